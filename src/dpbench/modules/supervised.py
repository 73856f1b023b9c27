"""Base of modules that train one network by a loss of each record."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from dpbench.errors import ConfigurationError

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleMaker = Callable[[Optimizer], LRScheduler]


class Supervised(pl.LightningModule):
    """Training of a network by a loss of each record; knows nothing of privacy.

    A subclass computes the losses (`training_step`, by `_result`), and updates the metric of its `objective`
    (`measure`).

    Args:
        model: The network.
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        metric: Metric of data that are not trained on; its copies are the attributes `val_<name>` and `test_<name>`, if
            `objective` is "val/<name>".
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer, such as `functools.partial(CosineAnnealingLR, T_max=1000)`; it moves after
            every step. None: a constant learning rate.
        loss_reduction: Reduction of the losses of a batch, "mean" or "sum".

    Raises:
        ConfigurationError: The model is that of a GAN.
        ValueError: There is no such reduction.
    """

    masks_padding = False
    """States that `training_step` heeds `rows_present` in all that it returns and logs, as `_result` does, computes the
    same in each batch and leaves nothing behind, so that `executor=graph` may pad batches of all sizes to one and
    repeat its kernels. A subclass states it anew."""
    rows_present: Tensor | None = None
    """Mask of the rows of the batch that are records, bool, (R,); the others are padding. None: all are."""
    objective: str
    """The metric by which a sweeper chooses, where records are held out and the user names none."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        metric: Metric,
        monitored: str = "val",
        schedule: ScheduleMaker | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__()
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"module.loss_reduction must be mean or sum, not {loss_reduction!r}.")
        if hasattr(model, "generator"):
            raise ConfigurationError("the model is a generator and a discriminator: add module=gan.")
        self._monitored = monitored
        self._sums = loss_reduction == "sum"
        self._logs_loss = False
        self.model = model
        self._make_optimizer = optimizer
        self._make_schedule = schedule
        self._metric = self.objective.partition("/")[2]
        for data in ("val", "test"):
            self.add_module(f"{data}_{self._metric}", metric.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of the network."""
        outputs: Tensor = self.model(inputs)
        return outputs

    @abstractmethod
    def measure(self, metric: Metric, batch: Any) -> None:
        """Bring a metric up to date with a batch that is not trained on."""

    def _result(
        self,
        losses: Tensor,
        record_metrics: Mapping[str, Callable[[], Tensor]],
    ) -> dict[str, Any]:
        """Make the result of a training step; the budget does not cover the logged value.

        Args:
            losses: Loss of each record, (R,).
            record_metrics: Functions that give a value (or row) for each record; called only if it is released.
        """
        present = self.rows_present
        if present is None:
            mean = losses.mean()
        else:
            losses = torch.where(present, losses, 0.0)
            mean = losses.sum() / present.sum().clamp(min=1)
        if self._logs_loss and len(losses):
            # Not for a progress bar: Lightning would read it from the device in each step up to the end of the epoch.
            self.log("nonprivate/train_loss", mean.detach(), batch_size=len(losses))
        return {
            "loss": losses.sum() if self._sums else mean,
            "record_metrics": {"loss": lambda: losses, **record_metrics},
        }

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Find out here whether the coming batch's loss is logged: `executor=graph` cannot repeat a step that asks."""
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._logs_loss = (self.trainer.global_step + 1) % max(every, 1) == 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The metric on the monitored data."""
        self._measured("val", self._monitored, batch, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """The metric on test data."""
        self._measured("test", "test", batch)

    def _measured(
        self,
        copy: str,
        data: str,
        batch: Any,
        prog_bar: bool = False,
    ) -> None:
        metric: Metric = getattr(self, f"{copy}_{self._metric}")
        self.measure(metric, batch)
        rows = len(batch if isinstance(batch, Tensor) else batch[0])
        self.log(f"{data}/{self._metric}", metric, prog_bar=prog_bar, batch_size=rows)

    def configure_optimizers(self) -> Any:
        """The optimizer over all trainable parameters, and its schedule."""
        optimizer = self._make_optimizer(p for p in self.parameters() if p.requires_grad)
        if self._make_schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self._make_schedule(optimizer), "interval": "step"}]
