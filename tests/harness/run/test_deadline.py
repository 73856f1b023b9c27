"""`run.max_time`: a run stops by itself in time, with all that a resume needs."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from dpbench.errors import TIME_LIMIT_REACHED, Interrupted
from dpbench.harness.run import _checkpoint as checkpoint
from dpbench.harness.run._checkpoint import deadline_of, seconds_of
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import FEW, dpbench
from tests.support.processes import TWO, config_of, content_of


def test_durations() -> None:
    words = ["45m", "2h30m", "1d12h", "90s", "00:30:00", "1-12:00:00"]
    assert list(map(seconds_of, words)) == [2700, 9000, 129600, 90, 1800, 129600]


@pytest.mark.parametrize("word", ["", "0s", "5", "5m1h", "-5m", "1:99:00", "99999999d"])
def test_no_durations(word: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the word alone: whoever reads a setting says what it takes)
        seconds_of(word)


def test_no_duration_is_one_line(tmp_path: Path) -> None:
    _, err = dpbench(tmp_path, "train", *FEW, "run.max_time=3600", "hydra.run.dir=run", status=1)
    assert err.startswith("dpbench: error: run.max_time must be a duration such as 45m, 2h30m")
    assert err.count("\n") == 1 and not (tmp_path / "run").exists()


class Clock(pl.Callback):
    """Time that passes when it is told to, or an hour in a step: a busy machine makes any number of them in a time."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 3600


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(checkpoint, "time", clock)
    return clock


def test_the_end_of_a_slurm_job_is_an_end_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock.now = 1000.0
    assert deadline_of(None, clock.now) == math.inf
    assert deadline_of("10m", clock.now) == 1600
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1130")
    assert [deadline_of(limit, clock.now) for limit in (None, "10m", "10s")] == [1100, 1100, 1010]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], pytest.param(TWO, marks=pytest.mark.long)], ids=["one", "two"])
def test_a_run_that_was_stopped_by_its_time_goes_on_as_if_it_had_not(
    tmp_path: Path, words: list[str], clock: Clock
) -> None:
    part, whole = tmp_path / "part", tmp_path / "whole"
    words = [*words, "strategy.noise_multiplier=null", "strategy.target_epsilon=8"]  # no line compares it with its plan
    limited = config_of(*words, "run.max_time=5h30m", "run.checkpoint_every_n_steps=500")
    with pytest.raises(Interrupted, match="time limit reached.*continue with: dpbench resume") as caught:
        train(limited, part, [clock])
    assert (caught.value.number, caught.value.status) == (TIME_LIMIT_REACHED, 75)
    assert len(read_ledger(RunFolder(part).ledger).releases) == 5 and not RunFolder(part).finished
    assert json.loads(RunFolder(part).partial_result.read_text())["steps"] == 5
    clock.now = time.monotonic()
    train(config_of(*words, "run.max_time=1h", "run.resume=true"), part)
    train(config_of(*words), whole)
    assert content_of(part) == content_of(whole)


def test_the_time_of_a_run_is_no_end_of_it_when_it_is_over_at_the_last_step(tmp_path: Path, clock: Clock) -> None:
    train(config_of("trainer.max_steps=1", "run.max_time=30m"), tmp_path / "run", [clock])
    assert RunFolder(tmp_path / "run").finished
