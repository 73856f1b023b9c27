"""Jobs that a scheduler starts again after it has stopped them: their runs go on, without a word from anybody."""

from __future__ import annotations

import os
import signal
from typing import Any

from dpbench.errors import ConfigurationError, Interrupted
from dpbench.files import write_atomically
from dpbench.run.saved_config import read_config
from dpbench.runs.folder import RunFolder

RAY_TASK = "DPBENCH_RAY_TASK"
"""Variable in which a job of `launcher=ray` has its name."""


def job_name() -> str | None:
    """The scheduler's job that this process is of: the same when the job is started again. None without one."""
    asked = os.environ.get
    if own := asked(RAY_TASK):
        return f"Ray {own}"
    if own := asked("SUBMITIT_LOCAL_JOB_ID"):
        return f"submitit {own}"
    if array := asked("SLURM_ARRAY_JOB_ID"):
        return f"Slurm {array}_{asked('SLURM_ARRAY_TASK_ID')}"
    return f"Slurm {own}" if (own := asked("SLURM_JOB_ID")) else None


def note_job(folder: RunFolder) -> None:
    """Write down by which job a run was begun, if by any."""
    if (own := job_name()) is not None:
        write_atomically(folder.job, own)


def started_again(folder: RunFolder, config: dict[str, Any]) -> bool:
    """Whether a folder holds the run that this very job began: the same settings, and the scheduler started it anew.

    Args:
        folder: Of the run.
        config: Its resolved configuration.
    """
    own = job_name()
    if own is None or not folder.job.is_file() or folder.job.read_text(encoding="utf-8") != own:
        return False
    try:
        return resuming(read_config(folder)) == resuming(config)
    except ConfigurationError:
        return False  # whoever wants the folder says what is wrong with it


def resuming(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run that is resumed."""
    return {**config, "run": {**config["run"], "resume": True}}


def stops_only_a_copy(number: int) -> bool:
    """Whether a signal does not end this job: submitit's get a SIGTERM together with the notice of a preemption.

    Who ends there by a SIGTERM is over for submitit, though Slurm starts it again.
    """
    return "SUBMITIT_EXECUTOR" in os.environ and number == signal.SIGTERM


def hand_back(error: Interrupted) -> None:
    """Let submitit put the job into the queue again, which ends this process: everything is saved.

    Its own handler would do so in the middle of a step.
    """
    handler = signal.getsignal(error.number)
    if "SUBMITIT_EXECUTOR" in os.environ and error.number in (signal.SIGUSR1, signal.SIGUSR2) and callable(handler):
        handler(error.number, None)
