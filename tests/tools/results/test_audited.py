"""Tables with an audited epsilon beside the claimed one of each private cell."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from dpbench.files import write_json
from dpbench.harness.reproduce.jobs import ATTEMPT, Job
from dpbench.harness.reproduce.tables import Variant, read_table
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.record import read_result
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import PRIVATE, TINY, dpbench
from tools.audits.mutants import MUTANTS
from tools.results import audited, choices
from tools.results.audited import FOLDER, main, read_lines, write_page

TABLE = """
title: Digits
source: nowhere
metric: test/accuracy
seeds: [3, 4]
hours: 0.01
words: [data=digits, model=mlp, "model.hidden=[16]", data.expected_batch_size=64, engine.native=off,
  strategy.delta=1e-4]
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


@pytest.fixture(autouse=True)
def how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Says how the table is audited."""
    path = tmp_path / "how.yaml"
    path.write_text("own/digits: {steps: 40, words: [audit.canaries=400]}\n", encoding="utf-8")
    monkeypatch.setattr(audited, "HOW", path)
    return path


def _audit(folder: Path, *words: str, table: str = TABLE) -> int:
    path = folder / "own" / "digits.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(table, encoding="utf-8")
    where = ["--out", str(folder / "out"), "--runs", str(folder / "runs")]
    return main([str(path), *where, *words])


@pytest.mark.long
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
    assert (lines[["family", "release_game", "one_run_dp"]] >= 0).all(axis=None)
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


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["half of the noise", "no clipping"])
def test_a_broken_mechanism_is_accused(
    in_process: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    with MUTANTS[broken]():
        assert _audit(tmp_path, "rows=whole") == 3
    lines = read_lines(tmp_path / "out" / FOLDER / "runs.csv")
    assert lines["verdict"].isin(["VIOLATED", "NOT AS DECLARED"]).all() and lines["accused_by"].notna().all()
    page = (tmp_path / "out" / FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"1 at this level: own/digits, 30 steps ({lines['accused_by'][0]})" in page
    printed = f"{lines['verdict'][0]}: own/digits, whole, private, seed 3 ({lines['accused_by'][0]}); to audit it again"
    assert printed in capsys.readouterr().out
    # Neither a mended mechanism nor another definition takes the accusation away; other cells are audited.
    assert len(in_process) == 1
    longer = TABLE.replace("trainer.max_steps=30", "trainer.max_steps=31")
    assert _audit(tmp_path, table=longer) == 3
    assert in_process[1:] == ["planned, private, with_canaries, seed 3"]
    assert printed in capsys.readouterr().out
    path = tmp_path / "out" / FOLDER / "runs.csv"
    lines = read_lines(path)
    assert lines["row"].tolist() == ["whole", "planned"] and lines["steps_of_the_row"].tolist() == [30, 2000]
    # Removed by hand, it is another matter.
    lines[lines["row"] == "planned"].to_csv(path, index=False)
    assert _audit(tmp_path, "--keep", table=longer) == 0
    assert read_lines(path)["verdict"].tolist() == ["CONSISTENT", "CONSISTENT"]


def test_the_committed_page_is_that_of_its_lines_and_gives_the_chance_of_what_is_above(tmp_path: Path) -> None:
    committed = Path(__file__).parents[3] / "results" / FOLDER
    shutil.copy(committed / "runs.csv", tmp_path)
    write_page(tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page == (committed / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"(\d+) of (\d+), p = ([\d.]+) \(", page)
    assert len(found) == 3
    for count, number, chance in found:
        expected = stats.binomtest(int(count), int(number), 0.05, alternative="greater").pvalue
        assert float(chance) == pytest.approx(expected, abs=0.005)


@pytest.mark.slow
def test_a_run_that_shows_nothing_takes_no_verdict_away_and_hides_no_other(
    in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _audit(tmp_path, "rows=whole") == 0
    path = tmp_path / "out" / FOLDER / "runs.csv"
    verdict = read_lines(path)
    for row in ("whole", "planned"):
        if row == "planned":
            assert _audit(tmp_path, "rows=planned") == 0
            read_lines(path).head(1).to_csv(path, index=False)
        (ledger,) = (tmp_path / "runs" / "own_digits").glob(f"{row}-*/ledger.jsonl")
        ledger.write_bytes(ledger.read_bytes()[:-200])
    capsys.readouterr()
    assert _audit(tmp_path, "seeds=3,4") == 1
    text = capsys.readouterr().out
    assert text.count("not audited: ") == 2 and "not audited: planned, private, with_canaries, seed 3: planned-" in text
    lines = read_lines(path)
    pd.testing.assert_frame_equal(lines.head(1), verdict, check_dtype=False)
    assert lines["row"].tolist() == ["whole", "whole", "planned", "planned"]
    assert lines["verdict"].fillna("").tolist() == ["CONSISTENT", "CONSISTENT", "", "CONSISTENT"]
    assert "Restore the ledger, or delete this folder" in lines["why_not"][2] and str(tmp_path) not in path.read_text()

    def fails(jobs: Sequence[Job], _: Sequence[str]) -> None:
        for job in jobs:
            job.path.mkdir(parents=True, exist_ok=True)
            write_json(job.path / ATTEMPT, {"threads": 1, "error": "killed"})

    monkeypatch.setattr(audited, "sweep", fails)
    shutil.rmtree(tmp_path / "runs")
    assert _audit(tmp_path) == 1
    lines = read_lines(path)
    assert lines["verdict"].fillna("").tolist() == ["CONSISTENT", "CONSISTENT", "", "CONSISTENT"]
    assert lines["why_not"][2] == "killed"


def test_a_run_that_was_killed_behind_its_last_step_makes_no_further_one(tmp_path: Path) -> None:
    stop = ["+callbacks.stop_after._target_=dpbench.callback.stop_after.StopAfter", "+callbacks.stop_after.steps=2"]
    words = [*TINY, *PRIVATE, *stop, "trainer.max_steps=9"]
    dpbench(tmp_path, "train", *words, "hydra.run.dir=run")
    run = RunFolder(tmp_path / "run")
    run.result.unlink()
    dpbench(tmp_path, "resume", "run")
    assert read_result(run)["steps"] == 2
    assert len(read_ledger(run.ledger).releases) == 2


def test_all_tables_are_looked_at_before_the_first_one_trains(
    in_process: list[str], tmp_path: Path, how: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "own" / "digits.yaml"
    folder.parent.mkdir()
    folder.write_text(TABLE, encoding="utf-8")
    other = folder.with_name("other.yaml")
    other.write_text(TABLE.replace("whole:", "entire:"), encoding="utf-8")
    how.write_text(f"{folder}: {{}}\n{other}: {{}}\n", encoding="utf-8")
    where = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    assert main(["all", "rows=whole", *where]) == 1
    assert "own/other has no row 'whole'" in capsys.readouterr().err
    assert main(["all", "seeds=60", *where]) == 1
    assert "would have 240 rows" in capsys.readouterr().err
    assert not in_process


def test_an_experiment_says_whether_its_cells_are_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "plain.yaml").write_text("defaults: [{override /strategy: none}]\n", encoding="utf-8")
    definition = tmp_path / "own" / "digits.yaml"
    definition.parent.mkdir()
    words = "words: [data=digits, "
    definition.write_text(TABLE.replace(words, "words: [experiment=plain, data=digits, "), encoding="utf-8")
    table = read_table(str(definition))
    without_strategy = table.model_copy(update={"columns": (Variant(name="private"),)})
    monkeypatch.setattr(choices, "conf_dir", lambda: tmp_path)
    assert not audited._private_cells(without_strategy)
    assert audited._private_cells(table) == {("whole", "private"), ("planned", "private")}


@pytest.mark.long
def test_a_row_that_cannot_be_audited_says_why(tmp_path: Path, how: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how.write_text(how.read_text(encoding="utf-8").replace("400", "4000"), encoding="utf-8")
    assert _audit(tmp_path, "rows=whole") == 1
    assert "1 failed" in capsys.readouterr().out
    page = (tmp_path / "out" / FOLDER / "README.md").read_text(encoding="utf-8")
    assert "| own/digits | 30 steps | 1437 records and the coordinates of this model" in page
    lines = pd.read_csv(tmp_path / "out" / FOLDER / "runs.csv")
    assert lines["verdict"].isna().all() and lines["why_not"].str.contains("take at most").all()


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ("", "", ["columns=private", "rows=x"], "has no row 'x'"),
        ("", "", ["seeds=101"], "would have 202 rows, and the verdicts of at most 200 hold together: audit fewer"),
        ("strategy=dpsgd", "strategy=none", [], "is private: there is no epsilon to audit"),
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
