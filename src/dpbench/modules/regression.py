"""Regression of numbers with any network."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric

from dpbench.errors import ConfigurationError
from dpbench.modules.supervised import OptimizerMaker, ScheduleMaker, Supervised


class SquaredErrors(Supervised):
    """Training by the mean squared error of each record; a subclass says which numbers are compared."""

    objective = "val/mean_squared_error"

    @abstractmethod
    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Predicted and true numbers of each record, (N, numbers) both."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Squared error of a batch, the mean over a record's numbers; the budget does not cover the logged value."""
        predicted, targets = self._pair(batch)
        return self._result((predicted - targets).square().mean(1), {})

    def losses(self, batch: Any) -> Tensor:
        """Squared error of each record, (N,), in double precision."""
        predicted, targets = self._pair(batch)
        return (predicted.double() - targets.double()).square().mean(1)

    def measure(self, metric: Metric, batch: Any) -> None:
        """Add up squared errors, of all numbers of all records together."""
        metric(*self._pair(batch))


class Regression(SquaredErrors):
    """Training by the mean squared error of the targets; knows nothing of privacy.

    A batch is inputs (N, ...) and targets (N,) or (N, num_targets), of any type of numbers.

    Args:
        model: (N, ...) → (N, num_targets), or (N,) for one target.
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        num_targets: Numbers to predict for each record.
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer; it moves after every step. None: a constant learning rate.
    """

    masks_padding = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        num_targets: int,
        monitored: str = "val",
        schedule: ScheduleMaker | None = None,
    ) -> None:
        super().__init__(model, optimizer, MeanSquaredError(), monitored, schedule)
        self._num_targets = num_targets
        self.record_metrics = {"loss": 1}

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Predicted and true targets, (N, num_targets) both.

        Raises:
            ConfigurationError: The model makes another number of outputs.
        """
        inputs, targets = batch
        rows = len(targets)
        predicted = self(inputs)
        # Without this check a prediction (N, 1) and targets (N,) would be broadcast to (N, N), and mix the records.
        if predicted.shape[1:].numel() != self._num_targets or targets.shape[1:].numel() != self._num_targets:
            raise ConfigurationError(
                f"the model returns {predicted.shape[1:].numel()} numbers for {targets.shape[1:].numel()} targets of a "
                "record: choose model=regression_mlp, whose outputs follow the data."
            )
        shape = (rows, self._num_targets)
        return predicted.reshape(shape), targets.reshape(shape).to(predicted.dtype)
