"""Regression, which is no task of dpbench's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytorch_lightning as pl
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]


class Regressor(pl.LightningModule):
    """Mean squared error.

    Args:
        model: Records → targets.
        optimizer: Called with the parameters.
        monitored: Name of the data that the validation loop sees.
    """

    objective = "val/error"

    def __init__(
        self, model: nn.Module, optimizer: Callable[[Iterable[nn.Parameter]], Optimizer], monitored: str = "val"
    ) -> None:
        super().__init__()
        self.model, self._make_optimizer, self._monitored = model, optimizer, monitored

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean over the records of a lot."""
        return F.mse_loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Error on the monitored data."""
        self.log(f"{self._monitored}/error", F.mse_loss(self.model(batch[0]), batch[1]), batch_size=len(batch[1]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Error on test data."""
        self.log("test/error", F.mse_loss(self.model(batch[0]), batch[1]), batch_size=len(batch[1]))

    def configure_optimizers(self) -> Optimizer:
        """Of the configuration."""
        return self._make_optimizer(self.parameters())
