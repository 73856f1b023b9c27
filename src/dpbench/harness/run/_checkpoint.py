"""The last checkpoint: every few steps, at the end, when a signal asks to stop, and when the time is over."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerStatus

from dpbench.errors import TIME_LIMIT_REACHED
from dpbench.files import replacing, write_json
from dpbench.harness.run._signals import StopSignals, handled_by
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.readers import Metrics, read_json

_UNITS = (86400, 3600, 60, 1)  # seconds of a day, an hour, a minute, a second
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_SLURM_DURATION = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_LONGEST = 10**9  # seconds
_BEFORE_A_KILL = 30.0  # seconds: for what comes after the last checkpoint


def seconds_of(duration: str) -> float:
    """Seconds of a duration: 45m, 2h30m, 1d12h, or Slurm's [days-]hours:minutes:seconds.

    Raises:
        ValueError: It is not a duration, or not positive.
    """
    seconds = 0
    match = _DURATION.fullmatch(duration) or _SLURM_DURATION.fullmatch(duration)
    if match is not None:
        for part, unit in zip(match.groups(), _UNITS, strict=True):
            seconds += int(part or 0) * unit
    if not 0 < seconds < _LONGEST:
        raise ValueError(duration)
    return float(seconds)


def deadline_of(max_time: str | None, start: float) -> float:
    """The end of `run.max_time`, or of this process's Slurm job, whichever comes first.

    Args:
        max_time: The configuration's `run.max_time`.
        start: The run's start on the clock of `time.monotonic`.

    Returns:
        The end on the same clock; infinite without one.
    """
    end = math.inf if max_time is None else start + seconds_of(max_time)
    slurm_end = os.environ.get("SLURM_JOB_END_TIME", "")
    if slurm_end.isdecimal() and int(slurm_end):
        remaining = int(slurm_end) - time.time() - _BEFORE_A_KILL
        end = min(end, time.monotonic() + remaining)
    return end


class LastCheckpoint(pl.callbacks.Checkpoint):
    """Keeps the last checkpoint, always at the end of a step, so that weights, batches and ledger agree.

    Nothing is chosen among checkpoints: choosing by a metric of private data would cost budget.

    Args:
        folder: The run's folder.
        every_n_steps: Steps between two checkpoints.
        deadline: The result of `deadline_of`.

    Attributes:
        metrics: Last value of each logged metric, as saved with the checkpoint.
        seconds_before: Wall time of the sessions before the checkpoint from which this one resumed.
    """

    def __init__(self, folder: RunFolder, every_n_steps: int, deadline: float = math.inf) -> None:
        self.folder = folder
        self.seconds_before = 0.0
        self.metrics: dict[str, float] = {}
        self._every = every_n_steps
        self._deadline = deadline
        self._last_step = 0.0  # when it ended
        self._longest_step = 0.0
        self._start = time.perf_counter()
        self._signals = StopSignals()
        self._agreed = 0  # what stops the training in all processes
        self._listening = False

    @property
    def interrupted(self) -> int:
        """Number of the signal that asked this process to end the training, or 0."""
        return self._signals.number

    @property
    def stopped_by(self) -> int:
        """Number of the signal that ended the training before its end, `TIME_LIMIT_REACHED`, or 0."""
        return self._agreed or self.interrupted

    def state_dict(self) -> dict[str, Any]:
        """Wall time so far."""
        return {"seconds": self.seconds_before + time.perf_counter() - self._start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the counts of a checkpoint."""
        self.seconds_before = float(state_dict["seconds"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take SIGTERM back from Lightning, which would exit with 0, or ignore it as before."""
        if self._listening:
            signal.signal(signal.SIGTERM, self._signals.hear)
        self._last_step = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time; after a signal, or when the time is over, save and stop."""
        is_last = trainer.should_stop or trainer.global_step == trainer.max_steps
        is_late = self._is_late() and not is_last
        self._agreed = self._agree_on_stop(trainer, is_late)
        if self._agreed:
            trainer.should_stop = True
            trainer.state.status = TrainerStatus.INTERRUPTED  # to be resumed
        save_now = self._signals.save_requested and trainer.world_size == 1  # several would have to agree on the step
        self._signals.save_requested = False
        if is_last or self._agreed or save_now or trainer.global_step % self._every == 0:
            self._save(trainer)

    def _is_late(self) -> bool:
        """Tell whether another step, as long as the longest one with its checkpoint, may come too late."""
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._last_step)
        self._last_step = now
        return now + self._longest_step >= self._deadline

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save also where the end comes from max_epochs or max_time."""
        if trainer.global_step != trainer.max_steps and not trainer.should_stop:
            self._save(trainer)

    def read_metrics(self) -> None:
        """Read the metrics logged up to the checkpoint, by another process or before an interruption."""
        self.metrics = {}  # stays so for an older version, or where there is no checkpoint yet
        if self.folder.checkpoint_metrics.is_file():
            values = read_json(self.folder.checkpoint_metrics, Metrics, "delete {path}: what was logged before is lost")
            for key, value in values.items():
                self.metrics[key] = math.nan if value is None else float(value)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Inside, the first of these signals finishes the step and stops; a second Ctrl-C interrupts at once."""
        with handled_by(self._signals.hear) as before:
            self._listening = bool(before)
            try:
                yield
            finally:
                self._listening = False

    def _agree_on_stop(self, trainer: pl.Trainer, is_late: bool) -> int:
        """Agree among all processes on the signal that stops the training, or 0."""
        number = self.interrupted or (TIME_LIMIT_REACHED if is_late else 0)
        if trainer.world_size == 1:
            return number
        greatest = torch.tensor(number, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX)
        return int(greatest)

    def _save(self, trainer: pl.Trainer) -> None:
        """Whole or not at all: Lightning copies from the system's temporary folder, which a full disk cuts short."""
        self._save_metrics(trainer)
        path = self.folder.checkpoint
        with replacing(path) if trainer.is_global_zero else nullcontext(path) as new:
            trainer.save_checkpoint(new)  # rank 0 writes; it needs what the others hold
        trainer.strategy.barrier(path.name)  # all processes read it in the end

    def _save_metrics(self, trainer: pl.Trainer) -> None:
        """Before the checkpoint, so that nothing that was logged before it is lost; and never into it.

        Checkpoints are published, and some metrics are private data (nonprivate/…).
        """
        for logger in trainer.loggers:
            logger.save()
        for key, value in trainer.callback_metrics.items():
            self.metrics[key] = float(value)
        if trainer.is_global_zero:
            self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
            finite = {key: value if math.isfinite(value) else None for key, value in self.metrics.items()}
            write_json(self.folder.checkpoint_metrics, finite)
