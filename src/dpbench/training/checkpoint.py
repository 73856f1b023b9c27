"""The last checkpoint: every few steps, at the end, and when somebody presses Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl


class LastCheckpoint(pl.callbacks.Checkpoint):
    """Keeps `last.ckpt`, always at the end of a step, so that weights, lots and ledger agree.

    Nothing is chosen among checkpoints: choosing by a metric of private data would cost budget.

    Args:
        path: The file.
        every_n_steps: Steps between two checkpoints.

    Attributes:
        interrupted: Whether a Ctrl-C ended the training.
        seconds_before: Wall time of the sessions before the checkpoint from which this one resumed.
    """

    def __init__(self, path: Path, every_n_steps: int) -> None:
        self.path = path
        self._every = every_n_steps
        self.interrupted = False
        self.seconds_before = 0.0
        self._start = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Wall time so far."""
        return {"seconds": self.seconds_before + time.perf_counter() - self._start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from the checkpoint."""
        self.seconds_before = float(state_dict["seconds"])

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if it is time; after a Ctrl-C, save and stop."""
        if self.interrupted:
            trainer.should_stop = True
        last = trainer.should_stop or trainer.global_step == trainer.max_steps
        if last or trainer.global_step % self._every == 0:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save also where the end comes from max_epochs or max_time."""
        if trainer.global_step != trainer.max_steps and not trainer.should_stop:
            trainer.save_checkpoint(self.path)

    @contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        """Inside, the first Ctrl-C finishes the step and stops; a second one interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
