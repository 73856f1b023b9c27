"""Runs that a results folder holds count as done where the user says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from dpbench.harness.reproduce._results import joined
from dpbench.harness.reproduce.jobs import Job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from tests.harness.reproduce.test_outputs import runs
from tests.support.cli import dpbench


class Held:
    """Results of other code that hold seed 0 of every cell; what a call would run is listed, and not run."""

    def __init__(self, definition: Path, folder: Path) -> None:
        self.definition = definition
        self.folder = folder
        self.jobs = table_jobs(read_table(str(definition)), folder / "runs")
        self.asked: list[list[str]] = []
        self.results = folder / "out" / "own_digits"
        self.runs = self.results / "runs.csv"
        self.results.mkdir(parents=True)
        lines = runs("short private .5, short plain .5, long private .5, long plain .5")
        lines["words"] = [" ".join(job.words) for job in self.jobs[:4]]
        lines.to_csv(self.runs, index=False)
        steps = {"row": "short", "column": "private", "seed": 0, "step": [1, 2, 3], "value": [0.2, 0.5, 0.8]}
        pd.DataFrame(steps).to_csv(self.results / "curves.csv", index=False)

    def sweep(self, jobs: Sequence[Job], *_: object) -> None:
        self.asked.append([job.name for job in jobs])

    def names(self, *seeds: int) -> list[str]:
        return [job.name for job in self.jobs if job.seed in seeds]

    def call(self, *words: str, status: int = 0) -> tuple[str, str]:
        return dpbench(
            self.folder, *f"reproduce {self.definition} --out out --runs runs".split(), *words, status=status
        )

    def edit(self, old: str, new: str) -> None:
        text = self.runs.read_text(encoding="utf-8")
        assert old in text
        self.runs.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture
def held(definition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(definition, tmp_path)
    monkeypatch.setattr("dpbench.harness.reproduce.reproduction.sweep", held.sweep)
    return held


def test_kept_runs_are_not_run_again(held: Held) -> None:
    """Nor those of another machine: `trainer=` says where a run was made, not what it is."""
    held.edit("logger=none", "logger=none trainer=gpu")
    assert "0/4 done" in held.call("--status", "--keep")[0] and not held.asked
    printed, _ = held.call("--keep")
    assert held.asked == [held.names(1)]
    assert "0/4 done, 0 begun, 0 failed, 4 to do\n4 more are kept" in printed
    assert "written to out/own_digits" in printed
    assert "- commit: abc" in (held.results / "README.md").read_text(encoding="utf-8")
    assert len(pd.read_csv(held.runs)) == 4
    assert len(pd.read_csv(held.results / "curves.csv")) == 3


def test_runs_of_other_code_need_a_word(held: Held) -> None:
    before = held.runs.read_bytes()
    _, error = held.call(status=1)
    assert "holds 4 run(s) of other code, settings or seeds: --replace overwrites them, --keep leaves" in error
    assert not held.asked
    assert held.runs.read_bytes() == before
    held.call("--replace")
    assert held.asked == [held.names(0, 1)]


def test_runs_of_this_code_are_kept_without_a_word(held: Held) -> None:
    lines = pd.read_csv(held.runs)
    lines["config_hash"] = [job.config_hash for job in held.jobs[:4]]
    lines.assign(code_hash=held.jobs[0].code_hash).to_csv(held.runs, index=False)
    held.call()
    assert held.asked == [held.names(1)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trainer.max_steps=3 ", "trainer.max_steps=4 ", "was run with other overrides than own/digits has now"),
        ("commit", "committed", "has no column commit"),
        (",0,test/accuracy,", ",,test/accuracy,", "without a whole number as its seed"),
        ("long,plain", "long,private", "has long, private, seed 0 twice"),  # which would count as two
    ],
    ids=["words", "column", "no seed", "twice"],
)
def test_runs_of_other_words_are_not_kept(held: Held, old: str, new: str, message: str) -> None:
    held.edit(old, new)
    assert message in held.call("--keep", status=1)[1]
    assert not held.asked


def test_a_run_that_is_kept_and_new_counts_as_the_new_one() -> None:
    old = runs("short private 0.5 0.6")
    new = old.tail(1).assign(value=0.7)
    assert list(joined(old, new)["value"]) == [0.5, 0.7]
    assert joined(pd.DataFrame(), new).equals(new)
