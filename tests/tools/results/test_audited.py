"""Tables with an audited epsilon beside the claimed one of each private cell."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from scipy import stats

from dpbench.harness.reproduce.jobs import Job
from tests.support.cli import dpbench
from tools.audits.mutants import MUTANTS
from tools.results import audited
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
    # A mended mechanism does not take the accusation away.
    assert _audit(tmp_path, "rows=whole") == 3
    assert f"{lines['verdict'][0]}: own/digits, whole, private, seed 3" in capsys.readouterr().out


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
