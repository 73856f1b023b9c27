"""How far a sweep is, by what its runs have written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dpbench.cli import main
from dpbench.run.progress import Progress, SweepProgress, _Display, watching
from dpbench.runs.folder import RunFolder
from dpbench.runs.sweep import Sweep


def run_of(folder: Path, steps: int, made: int, finished: bool = False) -> None:
    for place in (folder, folder / RunFolder.hydra):  # Hydra has a file of that name, too
        place.mkdir(parents=True, exist_ok=True)
        (place / RunFolder.config).write_text(f"trainer: {{max_steps: {steps}}}\n")
    (folder / RunFolder.lock).touch()
    (folder / RunFolder.metrics).write_text(f"step,val/accuracy\n{made},0.5\n")
    if finished:
        (folder / RunFolder.result).write_text("{}")


def test_steps_of_all_runs_count_also_those_that_have_not_begun(tmp_path: Path) -> None:
    run_of(tmp_path / "before", 1000, 1000, finished=True)
    sweep = Sweep(tmp_path, before=frozenset({tmp_path / "before"}), jobs=(("seed=1",),) * 4, apart=True)
    look = SweepProgress(sweep)
    empty = look()
    assert (empty.made, empty.counts) == (0, "0/4 done, 0 begun")
    run_of(tmp_path / "0", 10, 10, finished=True)
    run_of(tmp_path / "1", 30, 6)
    now = look()
    assert now == Progress(
        {str(tmp_path / "0"): "done", str(tmp_path / "1"): "begun"}, "1/4 done, 1 begun", 1 + 6 / 30, 4, True
    )


def test_a_run_that_epochs_end_counts_when_it_is_done(tmp_path: Path) -> None:
    run_of(tmp_path / "0", -1, 500)
    now = SweepProgress(Sweep(tmp_path, jobs=((), ())))()
    assert (now.made, now.steps) == (0, 2)


def test_each_run_that_ends_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    states = iter(
        [
            Progress({"a": "done"}, "1/3 done", 10, 30),
            Progress({"a": "done", "b": "done"}, "2/3 done", 20, 30),
            Progress({"a": "done", "b": "done"}, "2/3 done", 25, 30),
        ]
    )
    display = _Display(lambda: next(states), terminal=False)
    for _ in range(3):
        display.show()
    assert capsys.readouterr().err == "2/3 done: b is done\n"


def test_a_run_that_has_ended_before_anybody_looked_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    states = iter([None, Progress({"a": "done"}, "1/2 done", 3, 6), Progress({"a": "done"}, "1/2 done", 4, 6)])
    display = _Display(lambda: next(states), terminal=False)
    for _ in range(3):
        display.show()
    assert capsys.readouterr().err == "1/2 done: a is done\n"


def test_a_terminal_gets_a_bar_unless_runs_draw_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    for alone in (True, False):
        display = _Display(lambda alone=alone: Progress({}, "0/3 done", 10, 30, alone), terminal=True)
        display.show()
        display.close()
        assert ("0/3 done" in (err := capsys.readouterr().err) and "33%" in err) == alone


def test_what_fails_inside_is_raised() -> None:
    with pytest.raises(KeyError), watching(lambda: None):
        raise KeyError


@pytest.mark.slow
def test_a_sweep_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "model=mlp", "model.hidden=[8]", "trainer.max_steps=3", "seed=1,2", "logger=none"]
    assert main(["train", *words, "hydra.sweep.dir=sweep"]) == 0
    sys.stderr.flush()
    err = capsys.readouterr().err
    told = [line.split(": ")[1].split(",")[0] for line in err.splitlines() if " is done" in line]
    assert told == [
        f"sweep/{seed - 1}-digits-mlp-dpsgd-seed_{seed} is done" for seed in (1, 2)
    ]  # in one look, or in two
    assert "2/2 done, 0 begun: sweep/1" in err
