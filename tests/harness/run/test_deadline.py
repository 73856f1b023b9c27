"""`run.max_time`: a run stops by itself in time, with all that a resume needs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from dpbench.cli import main
from dpbench.errors import TIME_LIMIT_REACHED, Interrupted
from dpbench.harness.run import _checkpoint as checkpoint
from dpbench.harness.run._checkpoint import deadline_of, seconds_of
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import FEW
from tests.support.processes import TWO, config_of, content_of


@pytest.mark.parametrize(
    ("word", "seconds"),
    [("45m", 2700), ("2h30m", 9000), ("1d12h", 129600), ("90s", 90), ("00:30:00", 1800), ("1-12:00:00", 129600)],
)
def test_durations(word: str, seconds: int) -> None:
    assert seconds_of(word) == seconds


@pytest.mark.parametrize("word", ["", "abc", "0s", "00:00:00", "5", "1h 5m", "5m1h", "-5m", "1:99:00", "99999999d"])
def test_no_durations(word: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the word alone: whoever reads a setting says what it takes)
        seconds_of(word)


@pytest.mark.parametrize("word", ["3600", "abc", "0s"])
def test_no_duration_is_one_line(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *FEW, f"run.max_time={word}", f"hydra.run.dir={tmp_path / 'run'}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: run.max_time must be a duration such as 45m, 2h30m")
    assert err.count("\n") == 1 and not (tmp_path / "run").exists()


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return time.perf_counter()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(checkpoint, "time", clock)
    return clock


def test_the_end_of_a_slurm_job_is_an_end_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert deadline_of(None, clock.now) == math.inf
    assert deadline_of("10m", clock.now) == clock.now + 600
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(clock.now) + 130))
    for limit in (None, "10m"):
        assert deadline_of(limit, clock.now) == clock.now + 100
    assert deadline_of("10s", clock.now) == clock.now + 10


class Hour(pl.Callback):
    """A step takes an hour; of real ones a busy machine would make any number in a given time, or none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        self._clock.now += 3600


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], pytest.param(TWO, marks=pytest.mark.long)], ids=["one", "two"])
def test_a_run_that_was_stopped_by_its_time_goes_on_as_if_it_had_not(
    tmp_path: Path, words: list[str], clock: Clock
) -> None:
    part, whole = tmp_path / "part", tmp_path / "whole"
    words = [*words, "strategy.noise_multiplier=null", "strategy.target_epsilon=8"]  # no line compares it with its plan
    limited = config_of(*words, "trainer.max_steps=30", "run.max_time=9h30m", "run.checkpoint_every_n_steps=500")
    clock.now = time.monotonic()
    with pytest.raises(Interrupted, match="its time is over.*continue with: dpbench resume") as caught:
        train(limited, part, [Hour(clock)])
    assert (caught.value.number, caught.value.status) == (TIME_LIMIT_REACHED, 75)
    assert len(read_ledger(RunFolder(part).ledger).releases) == 9 and not RunFolder(part).finished
    assert json.loads(RunFolder(part).partial_result.read_text())["steps"] == 9
    clock.now = time.monotonic()
    longer = config_of(*words, "trainer.max_steps=30", "run.max_time=1h", "run.resume=true")
    train(longer, part)
    train(config_of(*words, "trainer.max_steps=30"), whole)
    assert content_of(part) == content_of(whole)


def test_the_time_of_a_run_is_no_end_of_it_when_it_is_over_at_the_last_step(tmp_path: Path, clock: Clock) -> None:
    clock.now = time.monotonic()
    train(config_of("trainer.max_steps=1", "run.max_time=30m"), tmp_path / "run", [Hour(clock)])
    assert RunFolder(tmp_path / "run").finished


@pytest.mark.long
def test_the_other_runs_of_a_sweep_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run.name=x", "trainer.max_steps=10000000,2", "run.max_time=20s", "hydra.sweep.dir=sweep"]
    assert main(["train", "-m", *FEW, *words]) == 75
    assert "its time is over" in capsys.readouterr().err
    (run,) = (tmp_path / "sweep").glob("*/result.json")
    assert run.parent.name == "1-x-max_steps_2"
