"""`dpbench compare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reports.run_table import RunTable
from tests.support.cli import dpbench
from tests.support.finished_runs import written


def test_runs_are_shown_side_by_side(tmp_path: Path) -> None:
    """Without what nobody set (the seed of made-up records follows the run's), nor ε by RDP as it was logged last."""
    runs = """
    a: {seed: 1, config.data.inserted.seed: 1, seconds: 2.5, metrics.privacy/epsilon: 1.5}
    b|c: {lr: 0.2, config.data.inserted.seed: 0, accuracy: 0.95, metrics.privacy/epsilon: 1.5}
    """
    assert RunTable.read([written(tmp_path, runs)]).compare().splitlines() == [
        "| run | a, seed 1 | b\\|c, seed 0 |",
        "| --- | ---: | ---: |",
        "| optimizer.lr | 0.1 | 0.2 |",
        "| seed | 1 | 0 |",
        "| test accuracy (%) | 90.00 | 95.00 |",
        "| epsilon (RDP) | 1.500 | 1.500 |",
        "| epsilon (PLD) | – | – |",
        "| seconds | 2.5 | 3 |",
        "| steps | 1000 | 1000 |",
    ]
    assert markdown_rows([["x|y", "z"], ["1", "2\n3"]]).splitlines()[::2] == ["| x\\|y | z |", "| 1 | 2 3 |"]


def test_runs_of_several_seeds_are_a_mean(tmp_path: Path) -> None:
    written(tmp_path, "a0: {accuracy: 0.8}\na1: {seed: 1}\nb: {lr: 0.2, accuracy: 0.5}")
    for name, last in (("a0", "0.8"), ("a1", "0.9"), ("b", "0.5")):
        (tmp_path / name / "metrics.csv").write_text(f"step,val/accuracy\n1,0.1\n2,{last}\n")
    (tmp_path / "a0" / "metrics.csv").write_text("step,val/accuracy,privacy/epsilon\n1,0.1,0.5\n2,0.8,1.5\n")
    shown, _ = dpbench(tmp_path, *["compare", ".", "--mean", "--axis", "epsilon", "--plot", "new/mean.png"])
    assert "85.00 ± 7.07" in shown and "| seed | 0, 1 | 0 |" in shown
    assert "none of these logged any" in shown  # one of them does not tell its epsilon, so the mean does not
    mean, other = RunTable.read([tmp_path], curves=True).over_seeds().rows
    assert (mean.n, other.n) == (2, 1)
    assert mean.curves["val/accuracy"].to_dict() == {1: 0.1, 2: pytest.approx(0.85)}
    assert mean.bands["val/accuracy"][2] == pytest.approx(0.1 / 2**0.5)
    dpbench(tmp_path, "compare", "a0", "--plot", "x.pdf")
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")
    assert "should end in .png or .pdf" in dpbench(tmp_path, "compare", "a0", "--plot", "x.jpg", status=2)[1]


def test_a_legend_says_what_differs(tmp_path: Path) -> None:
    runs = RunTable.read([written(tmp_path, "a: {}\nb: {seed: 1}\nc: {lr: 0.2}")])
    assert runs.labels() == ["lr=0.1, seed=0", "lr=0.1, seed=1", "lr=0.2, seed=0"]
    assert runs.over_seeds().labels() == ["lr=0.1 (n = 2)", "lr=0.2"]
    written(tmp_path / "code", "a: {}\nb: {seed: 1, code_hash: other}")
    assert [row.n for row in RunTable.read([tmp_path / "code"]).over_seeds().rows] == [1, 1]
    assert RunTable(runs.rows[:2]).labels() == ["seed=0", "seed=1"]
    assert RunTable(runs.rows[:1]).labels() == ["a, seed 0"]


def test_a_seed_that_equals_the_runs_by_chance_is_a_setting(tmp_path: Path) -> None:
    """Data dealt to users by an allocation of seed 0: the run of seed 0 is no other setting than that of seed 1."""
    runs = RunTable.read(
        [written(tmp_path, "a: {config.data.options.seed: 0}\nb: {config.data.options.seed: 0, seed: 1}")]
    )
    (group,) = runs.groups_of_seeds()
    assert len(group) == 2
    assert runs.differing() == ["seed"]
