"""Runs that a results folder holds count as done where the user says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from dpbench.cli import main
from dpbench.harness.reproduce._results import joined
from dpbench.harness.reproduce.jobs import Job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from tests.harness.reproduce.test_outputs import runs


@pytest.fixture
def held(definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Job], list[list[str]]]:
    """Results of other code that hold seed 0 of every cell; what a call would run is listed, and not run."""
    asked: list[list[str]] = []

    def listed(jobs: Sequence[Job], *_: object) -> None:
        asked.append([job.name for job in jobs])

    monkeypatch.setattr("dpbench.harness.reproduce.reproduction.sweep", listed)
    jobs = table_jobs(read_table(str(definition)), tmp_path / "runs")
    lines = runs({(job.row, job.column, job.seed): 0.5 for job in jobs if job.seed == 0})
    lines["words"] = [" ".join(job.words) for job in jobs if job.seed == 0]
    folder = tmp_path / "out" / "own_digits"
    folder.mkdir(parents=True)
    lines.to_csv(folder / "runs.csv", index=False)
    steps = {"row": "short", "column": "private", "seed": 0, "step": [1, 2, 3], "value": [0.2, 0.5, 0.8]}
    pd.DataFrame(steps).to_csv(folder / "curves.csv", index=False)
    return jobs, asked


def _call(definition: Path, tmp_path: Path, *words: str) -> int:
    return main(
        ["reproduce", str(definition), "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), *words]
    )


def test_kept_runs_are_not_run_again(
    held: tuple[list[Job], list[list[str]]], definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, asked = held
    assert _call(definition, tmp_path, "--keep") == 0
    assert asked == [[job.name for job in jobs if job.seed == 1]]
    printed = capsys.readouterr().out
    assert "0/4 done, 0 begun, 0 failed, 4 to do\n4 more are kept" in printed
    folder = tmp_path / "out" / "own_digits"
    assert f"written to {folder}" in printed and "- commit: abc" in (folder / "README.md").read_text(encoding="utf-8")
    assert len(pd.read_csv(folder / "runs.csv")) == 4 and len(pd.read_csv(folder / "curves.csv")) == 3


def test_status_counts_what_is_kept(
    held: tuple[list[Job], list[list[str]]], definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(definition, tmp_path, "--status") == 0
    assert "0/8 done" in capsys.readouterr().out
    assert _call(definition, tmp_path, "--status", "--keep") == 0
    assert "0/4 done" in capsys.readouterr().out and not held[1]


def test_runs_of_other_code_need_a_word(
    held: tuple[list[Job], list[list[str]]], definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs, asked = held
    before = (tmp_path / "out" / "own_digits" / "runs.csv").read_bytes()
    assert _call(definition, tmp_path) == 1
    error = capsys.readouterr().err
    assert "holds 4 run(s) of other code, settings or seeds: --replace overwrites them, --keep leaves" in error
    assert not asked and (tmp_path / "out" / "own_digits" / "runs.csv").read_bytes() == before
    assert _call(definition, tmp_path, "--replace") == 0
    assert asked == [[job.name for job in jobs]]


def test_runs_of_this_code_are_kept_without_a_word(
    held: tuple[list[Job], list[list[str]]], definition: Path, tmp_path: Path
) -> None:
    jobs, asked = held
    path = tmp_path / "out" / "own_digits" / "runs.csv"
    lines = pd.read_csv(path)
    lines["config_hash"] = [job.config_hash for job in jobs if job.seed == 0]
    lines.assign(code_hash=jobs[0].code_hash).to_csv(path, index=False)
    assert _call(definition, tmp_path) == 0
    assert asked == [[job.name for job in jobs if job.seed == 1]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trainer.max_steps=3 ", "trainer.max_steps=4 ", "was run with other words than own/digits has now"),
        ("commit", "committed", "has no column commit"),
        (",0,test/accuracy,", ",,test/accuracy,", "without a whole number as its seed"),
        (",0,test/accuracy,", ",0.5,test/accuracy,", "without a whole number as its seed"),
    ],
)
def test_runs_of_other_words_are_not_kept(
    held: tuple[list[Job], list[list[str]]],
    definition: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    message: str,
) -> None:
    path = tmp_path / "out" / "own_digits" / "runs.csv"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert _call(definition, tmp_path, "--keep") == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and not held[1]


def test_runs_of_another_machine_are_kept(
    held: tuple[list[Job], list[list[str]]], definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table begun on a GPU goes on without one: `trainer=` says where a run was made, not what it is."""
    path = tmp_path / "out" / "own_digits" / "runs.csv"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("logger=none", "logger=none trainer=gpu"), encoding="utf-8")
    assert _call(definition, tmp_path, "--keep") == 0
    assert "kept" in capsys.readouterr().out


def test_a_run_that_stands_there_twice_is_refused(
    held: tuple[list[Job], list[list[str]]], definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where somebody puts the files of two machines together: it would count as two."""
    path = tmp_path / "out" / "own_digits" / "runs.csv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]), encoding="utf-8")
    assert _call(definition, tmp_path, "--keep") == 1 and not held[1]
    assert "has long, plain, seed 0 twice" in capsys.readouterr().err


def test_a_run_that_is_kept_and_new_counts_as_the_new_one() -> None:
    old = runs({("short", "private", 0): 0.5, ("short", "private", 1): 0.6})
    new = runs({("short", "private", 1): 0.7})
    assert list(joined(old, new)["value"]) == [0.5, 0.7]
    assert joined(pd.DataFrame(), new).equals(new) and joined(old, pd.DataFrame()).equals(old)
    steps = pd.DataFrame({"row": "short", "column": "private", "seed": [0, 1], "step": 1, "value": [0.1, 0.2]})
    assert list(joined(steps, steps.iloc[1:].assign(value=0.9))["value"]) == [0.1, 0.9]
