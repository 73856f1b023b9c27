"""One progress bar for the whole run: steps, time left, loss, accuracy, epsilon."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytorch_lightning as pl
from tqdm import tqdm

_SHORT = {"privacy/epsilon": "epsilon", "nonprivate/train_loss": "loss", "val/accuracy": "val", "test/accuracy": "test"}


def watched() -> bool:
    """Whether somebody sees the progress: standard error is a terminal, and this is no job of a batch system."""
    return sys.stderr.isatty() and "SLURM_JOB_ID" not in os.environ


class RunProgress(pl.callbacks.ProgressBar):
    """A bar over all steps, instead of one for each short epoch.

    Args:
        enabled: False where nobody watches (no terminal).
    """

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self._enabled = enabled
        self._bar: tqdm[Any] | None = None

    def disable(self) -> None:
        """Called by Lightning on ranks other than 0."""
        self._enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar."""
        if self._enabled:
            steps = trainer.estimated_stepping_batches
            total = None if steps == float("inf") else int(steps)
            initial = trainer.global_step
            self._bar = tqdm(total=total, initial=initial, unit="step", desc="training", dynamic_ncols=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Advance, with the newest figures."""
        if self._bar is not None:
            figures = self.get_metrics(trainer, pl_module)
            self._bar.set_postfix({short: figures[k] for k, short in _SHORT.items() if k in figures}, refresh=False)
            self._bar.update()

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Lightning's progress bar metrics, rounded."""
        return {key: round(float(value), 4) for key, value in trainer.progress_bar_metrics.items()}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the terminal in order."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
