"""A training that stops early, at a number of steps that is fixed in advance."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from dpbench.options import PositiveInt


class StopAfter(pl.Callback):
    """Stops a training after its first steps, and leaves its plan as it is.

    With `trainer.max_steps` a training is planned anew: noise for a target epsilon and schedules follow from its number
    of steps. A training that this callback stops makes the same releases as the
    whole one up to there, and its ledger states their cost. Resumed behind the last of them, it makes no more.

    Args:
        steps: After how many the training stops.
    """

    def __init__(self, steps: PositiveInt) -> None:
        self.steps = steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop at once, if the steps are made: by a run that was killed behind the last of them, and goes on."""
        self._stop(trainer)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Stop, if the steps are made."""
        self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        if trainer.global_step >= self.steps:
            trainer.should_stop = True
