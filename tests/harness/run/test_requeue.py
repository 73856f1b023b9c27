"""A job that the scheduler starts again goes on with its run; nobody else does so by accident."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dpbench.errors import ConfigurationError, Interrupted
from dpbench.harness.run._resume import RAY_TASK, job_name
from dpbench.harness.run._signals import hand_back
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from tests.support.processes import config_of, content_of
from tests.support.signalled import Signals


def test_the_same_job_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, whole, config = tmp_path / "part", tmp_path / "whole", config_of()
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    train(config, whole)
    assert job_name() is None and not RunFolder(whole).job.exists()
    with pytest.raises(ConfigurationError, match="holds a finished run"):
        train(config, whole)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with pytest.raises(Interrupted) as caught:
        train(config, part, [Signals(signal.SIGUSR1, 5)])
    assert caught.value.status == 128 + signal.SIGUSR1
    for job, other in (("17", config_of("trainer.max_steps=9")), ("18", config)):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        with pytest.raises(ConfigurationError, match="holds an unfinished run"):
            train(other, part)  # another run of the same job, or the same run of another job
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    record = train(config, part)
    assert record["steps"] == 8 and content_of(part) == content_of(whole)
    before = RunFolder(part).result.read_bytes()
    assert train(config, part) == record  # started again after its end: nothing is left to do
    assert RunFolder(part).result.read_bytes() == before


def test_names_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "5", "ARRAY_JOB_ID": "4", "ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert job_name() == "Slurm 4_1"
    monkeypatch.setenv(RAY_TASK, "abc")
    assert job_name() == "Ray abc"


def test_submitit_hears_of_its_signal_when_all_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        hand_back(Interrupted(signal.SIGUSR2, "x"))
        assert not heard  # it is somebody else's
        monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
        for number in (signal.SIGTERM, signal.SIGUSR2):
            hand_back(Interrupted(number, "x"))
        assert heard == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)
