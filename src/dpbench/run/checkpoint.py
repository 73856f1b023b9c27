"""The last checkpoint: every few steps, at the end, when a signal asks to stop, and when the time is over."""

from __future__ import annotations

import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch

from dpbench.errors import OUT_OF_TIME
from dpbench.files import replacing, write_json
from dpbench.run.deadline import Deadline
from dpbench.run.requeue import bypassed
from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import Metrics, read_json

_FROM_PEOPLE = (signal.SIGINT, signal.SIGTERM)
_FROM_SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal, submitit's notice of a preemption
_SIGNALS = (*_FROM_PEOPLE, *_FROM_SCHEDULERS)


class LastCheckpoint(pl.callbacks.Checkpoint):
    """Keeps the last checkpoint, always at the end of a step, so that weights, lots and ledger agree.

    Nothing is chosen among checkpoints: choosing by a metric of private data would cost budget.

    Args:
        folder: Of the run.
        every_n_steps: Steps between two checkpoints.
        deadline: When the training must have ended.

    Attributes:
        interrupted: Number of the signal that asked this process to end the training, or 0.
        metrics: The last value of whatever was logged, as it stands beside the checkpoint.
        seconds_before: Wall time of the sessions before the checkpoint from which this one resumed.
    """

    def __init__(self, folder: RunFolder, every_n_steps: int, deadline: Deadline | None = None) -> None:
        self.folder = folder
        self._deadline = deadline or Deadline()
        self._every = every_n_steps
        self._stop_file = folder.stop_request  # how spawned processes learn of a signal, all at the same step
        self._parent = os.getpid()
        self._listening = False
        self.interrupted = 0
        self.seconds_before = 0.0
        self._start = time.perf_counter()
        self._session = secrets.token_hex(8)
        self._ended = False
        self._stopped = 0  # by what
        self._asked = False  # to save, and go on
        self.metrics: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Wall time so far, and the session that came to its end with this checkpoint, and by what."""
        seconds = self.seconds_before + time.perf_counter() - self._start
        return {"seconds": seconds, "ended": self._session if self._ended else None, "stopped": self._stopped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the counts of a checkpoint."""
        self.seconds_before = float(state_dict["seconds"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take SIGTERM back from Lightning, which would exit with 0; spawned processes leave signals to the parent."""
        if self._parent != os.getpid():
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        elif self._listening:
            signal.signal(signal.SIGTERM, self._stop)
        self._deadline.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time; after a signal, or when the time is over, save and stop."""
        late = self._deadline.step_made() and trainer.global_step != trainer.max_steps and not trainer.should_stop
        self._stopped = self._asked_to_stop(trainer, late)
        if self._stopped:
            trainer.should_stop = True
        self._ended = trainer.should_stop or trainer.global_step == trainer.max_steps
        if self._ended or self._wanted(trainer) or trainer.global_step % self._every == 0:
            self._save(trainer)

    def read_metrics(self) -> None:
        """Take over what was logged up to the checkpoint, in another process or before an interruption."""
        kept: dict[str, float | None] = {}  # of an older version, or no checkpoint yet
        if self.folder.checkpoint_metrics.is_file():
            kept = read_json(self.folder.checkpoint_metrics, Metrics, "delete {path}: what was logged before is lost")
        self.metrics = {key: math.nan if value is None else float(value) for key, value in kept.items()}

    def ended_here(self, kept: dict[str, Any]) -> bool:
        """Whether a checkpoint is the last one of the training that this object has watched.

        Args:
            kept: The content of the file.
        """
        return bool(kept["callbacks"][self.state_key].get("ended") == self._session)

    def stopped_by(self, kept: dict[str, Any]) -> int:
        """Number of the signal that ended the training before its end, `OUT_OF_TIME`, or 0.

        Args:
            kept: The content of the file.
        """
        of_workers = kept["callbacks"][self.state_key]["stopped"] if self.ended_here(kept) else 0
        return int(self.interrupted or self._stopped or of_workers)

    def _save_metrics(self, trainer: pl.Trainer) -> None:
        """Before the checkpoint, so that nothing that was logged before it is lost; and never into it.

        Checkpoints are what people publish, and some metrics are private data (nonprivate/…).
        """
        for logger in trainer.loggers:
            logger.save()
        self.metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
        if trainer.is_global_zero:
            self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
            finite = {key: value if math.isfinite(value) else None for key, value in self.metrics.items()}
            write_json(self.folder.checkpoint_metrics, finite)

    def _save(self, trainer: pl.Trainer) -> None:
        """Whole or not at all: Lightning copies from the system's temporary folder, which a full disk cuts short."""
        start = time.monotonic()
        self._save_metrics(trainer)
        path = self.folder.checkpoint
        with replacing(path) if trainer.is_global_zero else nullcontext(path) as new:
            trainer.save_checkpoint(new)  # rank 0 writes; it needs what the others hold
        trainer.strategy.barrier(path.name)  # all processes read it in the end
        self._deadline.saved(time.monotonic() - start)

    def _asked_to_stop(self, trainer: pl.Trainer, late: bool) -> int:
        """By what, if it is so: the same in all processes, whichever of them knows it."""
        number = self.interrupted or (OUT_OF_TIME if late else 0)
        if trainer.world_size == 1:
            return number
        if self._parent != os.getpid() and self._stop_file.exists():
            number = signal.SIGTERM  # the parent knows which it was
        found = torch.tensor(number, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return int(found)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save also where the end comes from max_epochs or max_time."""
        self._ended = True
        if trainer.global_step != trainer.max_steps and not trainer.should_stop:
            self._save(trainer)

    def _wanted(self, trainer: pl.Trainer) -> bool:
        """Whether a signal that stops nothing has come; several processes would have to agree on the step."""
        asked, self._asked = self._asked, False
        return asked and trainer.world_size == 1

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if bypassed(number):
            self._asked = True
            return
        if self.interrupted in _FROM_PEOPLE and number in _FROM_PEOPLE:
            raise KeyboardInterrupt
        if self.interrupted and number in _FROM_PEOPLE:
            return  # the end that a scheduler has given notice of
        self.interrupted = number
        self._stop_file.touch()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Inside, the first of these signals finishes the step and stops; a second Ctrl-C interrupts at once."""
        self._stop_file.unlink(missing_ok=True)  # of a process that was killed while it stopped
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        self._listening = True
        try:
            yield
        finally:
            self._listening = False
            for number, handler in before.items():
                signal.signal(number, handler)
            self._stop_file.unlink(missing_ok=True)
