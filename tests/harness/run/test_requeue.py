"""A job that the scheduler starts again goes on with its run; nobody else does so by accident."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.errors import ConfigurationError, Interrupted
from dpbench.harness.run._resume import job_name
from dpbench.harness.run._signals import hand_back
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import RunFolder
from tests.support.cli import dpbench_in_a_process
from tests.support.processes import config_of, content_of
from tests.support.signalled import Signals

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_the_same_job_goes_on_where_it_was_stopped(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, whole, config = tmp_path / "part", tmp_path / "whole", config_of()
    train(config, whole)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with pytest.raises(Interrupted) as caught:
        train(config, part, [Signals(number, 5)])
    assert caught.value.status == 128 + number
    other = config_of("trainer.max_steps=9")
    with pytest.raises(ConfigurationError, match="holds an unfinished run"):
        train(other, part)  # another run of the same job
    with monkeypatch.context() as later:
        later.setenv("SLURM_JOB_ID", "18")
        with pytest.raises(ConfigurationError, match="holds an unfinished run"):
            train(config, part)  # the same run of another job
    record = train(config, part)
    assert record["steps"] == 8 and content_of(part) == content_of(whole)
    before = RunFolder(part).result.read_bytes()
    assert train(config, part) == record  # started again after its end: nothing is left to do
    assert RunFolder(part).result.read_bytes() == before


def test_a_run_of_no_job_leaves_no_name_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
        monkeypatch.delenv(name)
    assert job_name() is None
    train(config_of(), tmp_path / "run")
    assert not RunFolder(tmp_path / "run").job.exists()
    with pytest.raises(ConfigurationError, match="holds a finished run"):
        train(config_of(), tmp_path / "run")


def test_a_job_of_an_array_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "5", "ARRAY_JOB_ID": "4", "ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert job_name() == "Slurm 4_1"


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


def _workers(folder: Path) -> list[int]:
    """Processes of submitit that work on a job below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "submitit.core._submit" in command and any(word.startswith(str(folder)) for word in command):
            found.append(int(process.name))
    return found


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
def test_a_preempted_job_of_submitit_ends_like_one_that_was_not(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["model=mlp", "model.hidden=[8]", "data.image_size=8", "logger=none", "strategy.delta=1e-4", "run.name=x"]
    words += ["trainer.max_steps=60", "run.checkpoint_every_n_steps=100000", "trainer.log_every_n_steps=10"]
    words += ["+callbacks.told._target_=tests.support.signalled.Preempted"]
    words += [f"+callbacks.told.number={int(signal.SIGUSR2)}", "+callbacks.told.step=20"]
    command = [sys.executable, "-m", "dpbench", "train", "-m", *words, "launcher=submitit_local", "seed=0"]
    command += [f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    there = {**os.environ, "PYTHONPATH": path}
    made = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=900)
    run = RunFolder(tmp_path / "sweep" / "0-x")
    assert made.returncode == 0, made.stderr
    assert _workers(tmp_path) == []
    assert json.loads(run.result.read_text())["config"]["run"]["resume"] is True  # it was made in two parts
    whole = tmp_path / "whole"
    dpbench_in_a_process(tmp_path, "train", *words, f"hydra.run.dir={whole}", PYTHONPATH=path)
    assert content_of(run.path) == content_of(whole)
