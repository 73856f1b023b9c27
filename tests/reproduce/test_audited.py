"""Tables with an audited epsilon beside the claimed one of each private cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from dpbench.cli import main
from dpbench.reproduce import audited
from dpbench.reproduce._jobs import Job
from dpbench.reproduce.audited import FOLDER, read_lines
from dpbench.runs.folder import RunFolder
from dpbench.runs.record import read_result
from tests.support.cli import dpbench
from tools.audits.mutants import MUTANTS

TABLE = """
title: Digits
source: nowhere
metric: test/accuracy
seeds: [3, 4]
hours: 0.01
words: [data=digits, model=mlp, "model.hidden=[16]", data.expected_batch_size=64, engine.native=off,
  strategy.delta=1e-4]
audit: {steps: 40, words: [audit.canaries=400]}
rows:
  whole: {label: 30 steps, words: [trainer.max_steps=30, strategy.noise_multiplier=1.0]}
  planned: {label: ε = 4, words: [trainer.max_steps=2000, strategy.noise_multiplier=null, strategy.target_epsilon=4]}
columns:
  private: {label: DP-SGD, words: [strategy=dpsgd]}
"""


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trains the runs of a sweep in this process, and lists them."""
    names: list[str] = []

    def sweep(jobs: Sequence[Job], _: Sequence[str]) -> None:
        for job in jobs:
            names.append(job.name)
            job.path.mkdir(parents=True, exist_ok=True)
            for command in job.commands():
                dpbench(job.path, *command)

    monkeypatch.setattr(audited, "sweep", sweep)
    return names


def _audit(folder: Path, *words: str, table: str = TABLE) -> int:
    path = folder / "own" / "digits.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(table, encoding="utf-8")
    where = ["--out", str(folder / "out"), "--runs", str(folder / "runs")]
    return main(["reproduce", str(path), "--audit", *where, *words])


def test_the_first_steps_of_a_run_are_audited_as_it_plans_them(
    in_process: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _audit(tmp_path) == 0
    assert in_process == ["whole, private, with_canaries, seed 3", "planned, private, with_canaries, seed 3"]
    lines = read_lines(tmp_path / "out" / FOLDER / "runs.csv")
    assert lines["steps"].tolist() == [30, 40] and lines["steps_of_the_row"].tolist() == [30, 2000]
    assert lines["canaries"].tolist() == [400, 400]
    assert (lines["epsilon_pld"] < lines["epsilon_rdp"]).all() and (lines["sound"] == lines["epsilon_pld"]).all()
    assert lines["verdict"].tolist() == ["CONSISTENT", "CONSISTENT"]
    assert (lines[["family", "release_game", "release_game_t", "one_run_dp"]] >= 0).all(axis=None)
    # The noise is that of all 2,000 steps, and 40 of them cost a part of the 4.
    assert lines["epsilon_rdp"][1] < 1
    (run,) = (tmp_path / "runs" / "own_digits").glob("planned-*")
    assert read_result(RunFolder(run))["privacy"]["noise_multiplier"] > 1.5
    page = (tmp_path / "out" / FOLDER / "README.md").read_text(encoding="utf-8")
    assert "30, all | 400" in page and "40 of 2,000 | 400" in page and "1 of 2 audits are of the first steps" in page
    capsys.readouterr()
    assert _audit(tmp_path, "--keep", "seeds=3,4") == 0
    assert in_process[2:] == ["whole, private, with_canaries, seed 4", "planned, private, with_canaries, seed 4"]
    lines = read_lines(tmp_path / "out" / FOLDER / "runs.csv")
    assert lines["row"].tolist() == ["whole", "whole", "planned", "planned"] and lines["seed"].tolist() == [3, 4, 3, 4]
    assert "2/2 done" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["half of the noise", "no clipping"])
def test_a_broken_mechanism_is_accused(in_process: list[str], tmp_path: Path, broken: str) -> None:
    with MUTANTS[broken]():
        assert _audit(tmp_path, "rows=whole") == 0
    lines = read_lines(tmp_path / "out" / FOLDER / "runs.csv")
    assert lines["verdict"].isin(["VIOLATED", "NOT AS DECLARED"]).all() and lines["accused_by"].notna().all()
    page = (tmp_path / "out" / FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"1 at this level: own/digits, 30 steps ({lines['accused_by'][0]})" in page


def test_a_row_that_cannot_be_audited_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    too_many = TABLE.replace("audit.canaries=400", "audit.canaries=4000")
    assert _audit(tmp_path, "rows=whole", table=too_many) == 1
    assert "1 failed" in capsys.readouterr().out
    page = (tmp_path / "out" / FOLDER / "README.md").read_text(encoding="utf-8")
    assert "| own/digits | 30 steps | 1437 records and the coordinates of this model" in page
    lines = pd.read_csv(tmp_path / "out" / FOLDER / "runs.csv")
    assert lines["verdict"].isna().all() and lines["why_not"].str.contains("take at most").all()
    assert _audit(tmp_path, "rows=whole", "--keep", "--status", table=too_many) == 1
    assert "0/1 done, 0 running, 1 failed" in capsys.readouterr().out  # it is tried again


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ("", "", ["--replace"], "--audit writes its own lines again, and no others: leave --replace out"),
        ("", "", ["columns=private", "rows=x"], "has no row 'x'"),
        ("", "", ["seeds=101"], "would have 202 rows, and the verdicts of at most 200 hold together: audit fewer"),
        ("strategy=dpsgd", "strategy=none", [], "is private: there is no epsilon to audit"),
        ("steps: 40", "steps: 0", [], "audit.steps must be a number from 1 on, not 0"),
        ("steps: 40", "step: 40", [], "unknown key audit.step .*Did you mean steps"),
        (
            "metric: test/accuracy",
            "metric: val/accuracy\ntrials: {a: {words: [data.val_size=100]}}",
            [],
            "chooses among trials by validation data: audit the table that chooses from it",
        ),
    ],
)
def test_what_cannot_be_audited_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: list[str], message: str
) -> None:
    table = TABLE.replace(old, new) if old else TABLE
    if "strategy=none" in new:  # which has no such options
        table = re.sub(r",\s+strategy\.[a-z_]+=[^,\]]+", "", table)
    assert _audit(tmp_path, *words, table=table) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error
