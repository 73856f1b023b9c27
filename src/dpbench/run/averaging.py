"""The moving average of the weights, which is what is tested and published."""

from __future__ import annotations

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor

from dpbench.errors import ConfigurationError


class _AveragedAtTheEnd(WeightAveraging):
    """Takes the average over after the last checkpoint, and also where a resumed run has nothing left to train."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Move the average to the module's device: it was made before the module came there."""
        assert self._average_model is not None
        self._average_model.to(pl_module.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do nothing yet: a checkpoint of the end would lose the weights that were trained."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the average into the module, for tests and publication."""
        super().on_train_end(trainer, pl_module)


def moving_average(decay: float) -> WeightAveraging:
    """Exponential moving average of the weights after every step (De et al. 2022, section 3.4).

    It is computed from released weights alone, so it costs no privacy, and its noise is smaller. After t steps the
    decay is min(decay, (1 + t) / (10 + t)), so that the first weights are soon forgotten. Lightning's callback
    validates, tests and publishes the average, and a checkpoint holds both: `state_dict` is the average.

    Args:
        decay: Weight of the old average, from 0 to below 1.

    Raises:
        ConfigurationError: It is outside of this range.
    """
    if not 0 <= decay < 1:
        raise ConfigurationError(f"ema_decay must be from 0 to below 1 (or null), not {decay}.")

    def average(old: Tensor, new: Tensor, steps: Tensor | int) -> Tensor:
        if not old.is_floating_point():  # counters
            return new
        t = float(steps)
        return old.lerp(new, 1 - min(decay, (1 + t) / (10 + t)))

    return _AveragedAtTheEnd(avg_fn=average)
