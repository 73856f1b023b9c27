"""Runs in groups: mean and standard deviation over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.groups import group_by, keys_of
from dpbench.harness.reports.run_table import RunTable
from tests.support.cli import dpbench
from tests.support.finished_runs import written

RDP = "epsilon (RDP)"
RATE = "| optimizer.lr | n | test accuracy (%) | epsilon (RDP) | epsilon (PLD) | steps |"


def grouped(folder: Path, *keys: str) -> RunTable:
    return group_by(RunTable.read([folder]), keys)


def lines(table: RunTable) -> list[str]:
    """Head and rows."""
    return [line for line in table.to_markdown().splitlines() if line.startswith("|") and "---" not in line]


SEEDS = """
a: {accuracy: 0.9}
b: {accuracy: 0.92, seed: 1}
c: {accuracy: 0.97, seed: 2}
d: {accuracy: 0.5, lr: 1}
e: {accuracy: 0.8, lr: 0.02}
f: {accuracy: 0.6, lr: 0.02, seed: 1}
"""


def test_mean_and_standard_deviation_over_seeds(tmp_path: Path) -> None:
    groups = grouped(written(tmp_path, SEEDS), "optimizer.lr")
    assert lines(groups) == [
        RATE,
        "| 0.02 | 2 | 70.00 ± 14.14 | 1.500 | – | 1000 |",
        "| 0.1 | 3 | 93.00 ± 3.61 | 1.500 | – | 1000 |",
        "| 1 | 1 | 50.00 | 1.500 | – | 1000 |",
    ]
    assert groups.notes == ("Mean ± standard deviation of n runs.",)
    everything = grouped(tmp_path)
    assert lines(everything)[1].startswith("| 6 | 78.17 ± 19.04 |")
    assert everything.notes[1] == "Runs of one row differ in more than their seed: in optimizer.lr."


def test_what_else_differs_in_a_row_is_told(tmp_path: Path) -> None:
    runs = """
    two/a: {rdp: 1.0}
    two/b: {rdp: 2.0, seed: 1, code_hash: d}
    zero: {rdp: null, seed: 2, config.strategy._target_: dpbench.strategies.DPSGD}
    """
    groups = grouped(written(tmp_path, runs), "optimizer.lr")
    assert groups.notes[1] == "Runs of one row differ in more than their seed: in code_hash, strategy."
    assert lines(groups)[1] == "| 0.1 | 3 | 90.00 ± 0.00 | – | – | 1000 |"  # of one the accountant says nothing
    assert grouped(tmp_path / "two").frame()[RDP].tolist() == [2]  # holds for each


def test_groups_are_called_by_their_files(tmp_path: Path) -> None:
    """But a class that was put in the place of a file's own is not hidden behind the file's name."""
    runs = """
    own/a: {config.strategy._target_: dpbench.strategies.DPSGD, choices: {strategy: dpsgd, data: digits}}
    b: {config.strategy._target_: dpbench.strategies.DPSGD, choices: {strategy: dpsgd, data: digits}, seed: 1}
    c: {config.strategy._target_: dpbench.strategies.NonPrivate, choices: {strategy: none, data: digits}}
    d: {config.strategy._target_: mine.Strategy, config.optimizer.name: null}
    """
    assert [line.split(" | ")[:4] for line in lines(grouped(written(tmp_path, runs), "strategy", "data"))[1:]] == [
        ["| Strategy", "–", "1", "90.00"],
        ["| dpsgd", "digits", "2", "90.00 ± 0.00"],
        ["| none", "digits", "1", "90.00"],
    ]
    assert RunTable.read([tmp_path]).over_seeds().labels() == [
        "strategy=dpsgd (n = 2)",
        "strategy=none",
        "strategy=Strategy",
    ]
    written(tmp_path / "own", "e: {config.strategy._target_: mine.Unclipped, choices: {strategy: dpsgd}}")
    assert RunTable.read([tmp_path / "own"]).labels() == ["strategy=DPSGD", "strategy=mine.Unclipped"]


def test_a_key_that_no_run_has(tmp_path: Path) -> None:
    written(tmp_path, "a: {}")
    with pytest.raises(ConfigurationError, match=r"no run has a key optimizer\.rl\. Did you mean optimizer\.lr\?"):
        grouped(tmp_path, "seed", "optimizer.rl")
    with pytest.raises(ConfigurationError, match="--group-by requires at least one key"):
        keys_of(" , ")
    assert keys_of("a.b, c,a.b") == ("a.b", "c")


def test_runs_without_a_result_are_named_and_not_averaged(tmp_path: Path) -> None:
    written(tmp_path, "a: {}\nb: {}\nc: {}")
    for name in ("b", "c"):
        (tmp_path / name / "result.json").rename(tmp_path / name / "config.yaml")
        (tmp_path / name / ".lock").touch()
    groups = grouped(tmp_path, "optimizer.lr")
    again = "; ".join(f"{tmp_path / name} (dpbench resume {tmp_path / name})" for name in ("b", "c"))
    assert groups.notes == (f"2 of 3 runs are not finished: {again}.",)
    assert lines(groups)[1].startswith("| 0.1 | 1 |")


def test_what_learned_from_canaries_stands_apart_and_shows_no_accuracy(tmp_path: Path) -> None:
    runs = """
    a: {accuracy: 0.9}
    b: {accuracy: 0.7, seed: 1}
    c: {accuracy: 0.1, seed: 2, config.audit._target_: dpbench.capabilities.canaries.GradientCanaries}
    """
    assert lines(grouped(written(tmp_path, runs), "optimizer.lr")) == [
        RATE.replace("| test", "| trained with canaries | test"),
        "| 0.1 | 1 | yes | – | 1.500 | – | 1000 |",
        "| 0.1 | 2 | – | 80.00 ± 14.14 | 1.500 | – | 1000 |",
    ]


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path, SEEDS.replace("{", "{config.objective: private/loss, metrics.private/loss: 0.2, "))
    out, _ = dpbench(tmp_path, "table", ".", "--group-by", "optimizer.lr")
    assert "| 0.02 | 2 | 70.00 ± 14.14 | 0.2 ± 0 | 1.500 | – | 1000 |\n" in out
    out, err = dpbench(tmp_path, "table", ".", "--group-by", "optimizer.lr", "--csv")
    assert out.startswith("optimizer.lr,n,test accuracy (%),test accuracy (%) sd,")
    assert out.count("\n") == 4
    assert err == "dpbench: note: Mean ± standard deviation of n runs.\n"
    assert dpbench(tmp_path, "table", ".", "--group-by", "lr", status=1)[1] == "dpbench: error: no run has a key lr.\n"


def test_a_run_that_stands_twice_counts_once(tmp_path: Path) -> None:
    """But where its noise is drawn anew each time."""
    runs = """
    a: {accuracy: 0.9}
    b: {accuracy: 0.9}
    c: {accuracy: 0.7, seed: 1}
    d: {lr: 0.3, config.strategy.secure: true}
    e: {lr: 0.3, config.strategy.secure: true}
    """
    groups = grouped(written(tmp_path, runs), "optimizer.lr")
    assert [line[:21] for line in lines(groups)[1:]] == ["| 0.1 | 2 | 80.00 ± 1", "| 0.3 | 2 | 90.00 ± 0"]
    assert f"left out: {tmp_path / 'b'}" in groups.notes[-1]


def test_the_best_by_validation_is_named(tmp_path: Path) -> None:
    runs = """
    accuracy/a: {metrics.val/accuracy: 0.5}
    accuracy/b: {metrics.val/accuracy: 0.7, seed: 1}
    accuracy/c: {metrics.val/accuracy: 0.8, lr: 0.2}
    accuracy/d: {metrics.val/accuracy: 0.6, lr: 0.2, seed: 1}
    loss/a: {metrics.val/loss: 0.5}
    loss/b: {metrics.val/loss: 0.9, lr: 0.2}
    """
    groups = grouped(written(tmp_path, runs) / "accuracy", "optimizer.lr")
    assert groups.frame()["validation accuracy (%)"].tolist() == pytest.approx([60, 70])
    assert f"Best by val/accuracy: {tmp_path / 'accuracy/c'} (80.00 %)." in groups.notes
    (note,) = RunTable.read([tmp_path / "loss"]).best_note()
    assert note == f"Best by val/loss: {tmp_path / 'loss/a'} (0.5)."  # less is better
