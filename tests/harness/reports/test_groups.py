"""Runs in groups: mean and standard deviation over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.groups import group_by, keys_of
from dpbench.harness.reports.run_table import RunTable

ACCURACY, RDP = "test accuracy (%)", "epsilon (RDP)"


def finished(
    folder: Path, lr: float, seed: int, accuracy: float | None, epsilon: float | None = 1.5, **more: Any
) -> None:
    """The record of a run, as far as tables read it; `more` replaces parts of it."""
    folder.mkdir(parents=True)
    record = {
        "config": {"run": {"name": "x"}, "optimizer": {"lr": lr}, "seed": seed, **more.pop("config", {})},
        "metrics": {"test/accuracy": accuracy, "private/loss": 2.0 * lr},
        "privacy": {"epsilon": {"rdp": epsilon, "pld": epsilon}, "delta": 1e-5, "unit": "example"},
        **{"seed": seed, "seconds": 3.0, "steps": 1000, "config_hash": f"{lr} {seed}", "code_hash": "c"},
        **{"versions": {}, "foreign_code": {}},
    }
    (folder / "result.json").write_text(json.dumps(record | more))


def chose(folder: Path, **choices: str) -> None:
    """What Hydra leaves of the groups of a run."""
    (folder / ".hydra").mkdir()
    text = yaml.safe_dump({"hydra": {"runtime": {"choices": {**choices, "hydra/launcher": "basic"}}}})
    (folder / ".hydra/hydra.yaml").write_text(text)


def grouped(folders: Sequence[Path], keys: Sequence[str]) -> RunTable:
    return group_by(RunTable.read(folders), keys)


def cells(groups: RunTable) -> list[dict[str, str]]:
    head, *rows = groups.texts()
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_mean_and_standard_deviation_over_seeds(tmp_path: Path) -> None:
    figures = {0.1: (0.9, 0.92, 0.97), 1: (0.5,), 0.02: (0.8, 0.6)}
    for lr, accuracies in figures.items():
        for seed, accuracy in enumerate(accuracies):
            finished(tmp_path / f"{lr}-{seed}", lr, seed, accuracy, epsilon=2.0)
    groups = grouped([tmp_path], ["optimizer.lr"])
    assert [row["optimizer.lr"] for row in cells(groups)] == ["0.02", "0.1", "1"]
    assert [row["n"] for row in cells(groups)] == ["2", "3", "1"]
    for row, line in zip(cells(groups), groups.frame().to_dict("records"), strict=True):
        own = [100 * accuracy for accuracy in figures[float(row["optimizer.lr"])]]
        assert line[ACCURACY] == pytest.approx(statistics.mean(own))
        if len(own) > 1:
            deviation = statistics.stdev(own)
            assert line[f"{ACCURACY} sd"] == pytest.approx(deviation)
            assert row[ACCURACY] == f"{statistics.mean(own):.2f} ± {deviation:.2f}"
        else:
            assert row[ACCURACY] == "50.00" and pd.isna(line[f"{ACCURACY} sd"])
        assert row[RDP] == "2.000"
    assert groups.notes == ("Mean ± standard deviation of n runs.",)
    everything = grouped([tmp_path], ())
    assert [row["n"] for row in cells(everything)] == ["6"]
    assert everything.notes[1] == "Runs of one row differ in more than their seed: in optimizer.lr."


def test_what_else_differs_in_a_row_is_told(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.1, 0, 0.9, epsilon=1.0)
    finished(tmp_path / "b", 0.1, 1, 0.9, epsilon=2.0, code_hash="d")
    finished(tmp_path / "c", 0.1, 2, 0.9, epsilon=None, config={"strategy": {"_target_": "dpbench.strategies.DPSGD"}})
    groups = grouped([tmp_path], ["optimizer.lr"])
    assert groups.notes[1] == "Runs of one row differ in more than their seed: in code_hash, strategy."
    ((row,), (line,)) = cells(groups), groups.frame().to_dict("records")
    assert row[RDP] == "–" and pd.isna(line[RDP])  # of one of them the accountant says nothing
    two = grouped([tmp_path / "a", tmp_path / "b"], ["optimizer.lr"])
    ((row,), (line,)) = cells(two), two.frame().to_dict("records")
    assert row[RDP] == "2.000" and line[RDP] == 2  # holds for each


def test_groups_are_called_by_their_files(tmp_path: Path) -> None:
    for number, name in enumerate(("dpsgd", "dpsgd", "none")):
        target = {"strategy": {"_target_": f"dpbench.strategies.{name}"}, "optimizer": {"lr": 0.1, "name": None}}
        finished(tmp_path / str(number), 0.1, number, 0.9, config=target)
        chose(tmp_path / str(number), strategy=name, data="digits")
    groups = grouped([tmp_path], ["strategy", "data", "optimizer.name"])
    found = [(row["strategy"], row["data"], row["optimizer.name"], row["n"]) for row in cells(groups)]
    assert found == [("dpsgd", "digits", "–", "2"), ("none", "digits", "–", "1")]
    finished(tmp_path / "library", 0.1, 5, 0.9, config={"strategy": {"_target_": "mine.Strategy"}})
    named = cells(grouped([tmp_path], ["strategy", "optimizer.name"]))
    assert ("Strategy", "–") in [(row["strategy"], row["optimizer.name"]) for row in named]


def test_words_stand_to_the_left_as_the_command_line_has_them(tmp_path: Path) -> None:
    for name, seed, target in (("dpsgd", 0, "DPSGD"), ("none", 10, "NonPrivate")):
        finished(tmp_path / name, 0.1, seed, 0.9, config={"strategy": {"_target_": f"dpbench.strategies.{target}"}})
        chose(tmp_path / name, strategy=name)
    table = RunTable.read([tmp_path])
    head, rule, *rows = table.to_markdown().splitlines()
    assert head.startswith("| run | seed | strategy | test") and rule.startswith("| --- | ---: | --- | ---: |")
    assert [row.split(" | ")[2] for row in rows] == ["dpsgd", "none"]
    assert table.labels() == ["strategy=dpsgd", "strategy=none"]
    assert "| strategy | dpsgd | none |" in table.compare()
    # A class that was put in the place of the file's own is not hidden behind the file's name.
    finished(tmp_path / "mine", 0.1, 0, 0.9, config={"strategy": {"_target_": "mine.Unclipped"}})
    chose(tmp_path / "mine", strategy="dpsgd")
    assert RunTable.read([tmp_path / "dpsgd", tmp_path / "mine"]).labels() == [
        "strategy=DPSGD",
        "strategy=mine.Unclipped",
    ]


def test_a_key_that_no_run_has(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.1, 0, 0.9)
    with pytest.raises(ConfigurationError, match=r"no run has a key optimizer\.rl\. Did you mean optimizer\.lr\?"):
        grouped([tmp_path], ["seed", "optimizer.rl"])
    with pytest.raises(ConfigurationError, match="--group-by names no key"):
        keys_of(" , ")
    assert keys_of("a.b, c,a.b") == ("a.b", "c")


def test_runs_without_a_result_are_named_and_not_averaged(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.1, 0, 0.9)
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        for file in ("config.yaml", ".lock"):
            (tmp_path / name / file).touch()
    groups = grouped([tmp_path], ["optimizer.lr"])
    again = [f"{tmp_path / name} (dpbench resume {tmp_path / name})" for name in ("b", "c")]
    assert groups.notes == (f"2 of 3 runs are not finished: {again[0]}; {again[1]}.",)
    assert cells(groups)[0]["n"] == "1"


def test_what_learned_from_canaries_stands_apart_and_shows_no_accuracy(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.1, 0, 0.9)
    finished(tmp_path / "b", 0.1, 1, 0.7)
    finished(
        tmp_path / "c",
        0.1,
        2,
        0.1,
        config={"audit": {"_target_": "dpbench.capabilities.canaries.GradientCanaries"}},
    )
    first, second = cells(grouped([tmp_path], ["optimizer.lr"]))
    assert {first["n"]: first[ACCURACY], second["n"]: second[ACCURACY]} == {"2": "80.00 ± 14.14", "1": "–"}
    assert {first["trained with canaries"], second["trained with canaries"]} == {"–", "yes"}


def test_a_doubtful_ledger_marks_the_epsilon_of_its_row(tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.1, 0, 0.9)
    privacy = {"epsilon": {"rdp": 1.5, "pld": 1.5}, "delta": 1e-5, "unit": "example", "damage": "a line is missing"}
    finished(tmp_path / "b", 0.1, 1, 0.9, privacy=privacy)
    (row,) = cells(grouped([tmp_path], ["optimizer.lr"]))
    assert row[RDP] == "1.500 (ledger not intact)" and row["ledger"] == "intact, a line is missing"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracy in enumerate((0.9, 0.8)):
        finished(tmp_path / str(seed), 0.1, seed, accuracy, config={"objective": "private/loss"})
    assert main(["table", str(tmp_path), "--group-by", "optimizer.lr"]) == 0
    assert "| 0.1 | 2 | 85.00 ± 7.07 | 0.2 ± 0 | 1.500 | 1.500 | 1000 |\n" in capsys.readouterr().out
    assert main(["table", str(tmp_path), "--group-by", "optimizer.lr", "--csv"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and out.startswith("optimizer.lr,n,test accuracy (%),test accuracy (%) sd,")
    assert err == "dpbench: note: Mean ± standard deviation of n runs.\n"
    assert main(["table", str(tmp_path), "--group-by", "lr"]) == 1
    assert capsys.readouterr().err == "dpbench: error: no run has a key lr.\n"


def test_a_run_that_stands_twice_counts_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        finished(tmp_path / name, 0.1, 0, 0.9)
    finished(tmp_path / "c", 0.1, 1, 0.7)
    groups = grouped([tmp_path], ["optimizer.lr"])
    assert cells(groups)[0]["n"] == "2" and groups.frame()[ACCURACY][0] == pytest.approx(80)
    assert f"left out: {tmp_path / 'b'}" in groups.notes[-1]
    for name in ("d", "e"):  # whose noise is drawn anew each time
        finished(tmp_path / name, 0.3, 0, 0.9, config={"strategy": {"secure": True}})
    assert [row["n"] for row in cells(grouped([tmp_path], ["optimizer.lr"]))] == ["2", "2"]


def test_the_best_by_validation_is_named(tmp_path: Path) -> None:
    for lr, seed, accuracy in ((0.1, 0, 0.5), (0.1, 1, 0.7), (0.2, 0, 0.8), (0.2, 1, 0.6)):
        metrics = {"val/accuracy": accuracy, "test/accuracy": 0.9}
        finished(tmp_path / f"{lr}-{seed}", lr, seed, 0.9, metrics=metrics)
    groups = grouped([tmp_path], ["optimizer.lr"])
    assert [row["validation accuracy (%)"] for row in cells(groups)] == ["60.00 ± 14.14", "70.00 ± 14.14"]
    assert f"Best by val/accuracy: {tmp_path / '0.2-0'} (80.00 %)." in groups.notes
    losses = {0.1: 0.5, 0.2: 0.9}
    for lr, loss in losses.items():
        finished(tmp_path / f"loss/{lr}", lr, 0, 0.9, metrics={"val/loss": loss, "test/accuracy": 0.9})
    (note,) = RunTable.read([tmp_path / "loss"]).best_note()
    assert note == f"Best by val/loss: {tmp_path / 'loss/0.1'} (0.5)."  # less is better
