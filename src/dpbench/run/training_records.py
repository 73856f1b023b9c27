"""How well a model knows the records that it was trained on: for research, outside of the guarantee.

What is measured here is of private records, without noise. It is named `nonprivate/…`, is off unless asked for, and
must not be published with a model that is meant to be private; choices by it are refused (`guards.choices`).
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader
from torchmetrics import Metric

from dpbench.errors import ConfigurationError


class TrainingRecords(pl.Callback):
    """The metric of a module on records that it is trained on, and how far it lies from that on others.

    At each validation and at the final test, with the weights that are measured there (their moving average, if there
    is one): `nonprivate/train_<metric>`, and `nonprivate/<metric>_gap`, which is that minus the metric of the
    validation or test data. Training is the same, to the last bit, as without it. Several processes measure the same
    records, each for itself.

    Args:
        most: How many records at most, the first ones of the training data.

    Raises:
        ConfigurationError: That is no record at all.
    """

    def __init__(self, most: int = 10_000) -> None:
        super().__init__()
        if most < 1:
            raise ConfigurationError(f"diagnostics.training_records must be at least 1 (or null), not {most}.")
        self._most = most
        self._loader: DataLoader[Any] | None = None
        self._value = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the records, and what they are measured by.

        Raises:
            ConfigurationError: The data or the module do not offer it.
        """
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not hasattr(data, "seen_dataloader"):
            raise ConfigurationError(
                f"diagnostics.training_records measures records of the training data, and {type(data).__name__} has no "
                "seen_dataloader(most), a DataLoader of the first of them: add it, or leave the word out."
            )
        if not hasattr(pl_module, "measure"):
            raise ConfigurationError(
                f"diagnostics.training_records measures as a test does, and {type(pl_module).__name__} has no "
                "measure(metric, batch) for it, as dpbench.modules.supervised.Supervised has: leave the word out."
            )
        self._loader = data.seen_dataloader(self._most)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure while the weights are in place: the moving average leaves before the end of the epoch."""
        self._measure(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what was measured."""
        self._log(pl_module, "val")

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the final weights."""
        self._measure(trainer, pl_module)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what was measured."""
        self._log(pl_module, "test")

    def _measure(self, trainer: pl.Trainer, module: Any) -> None:
        assert self._loader is not None
        metric: Metric = getattr(module, f"test_{_name_of(module)}").clone()
        metric.reset()
        metric.sync_on_compute = False  # every process has all of the records
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            for batch in self._loader:
                module.measure(metric, trainer.strategy.batch_to_device(batch))
        self._value = float(metric.compute())

    def _log(self, module: Any, data: str) -> None:
        name = _name_of(module)
        other: Metric = getattr(module, f"{data}_{name}")
        gap = self._value - float(other.compute())
        module.log_dict({f"nonprivate/train_{name}": self._value, f"nonprivate/{name}_gap": gap}, sync_dist=True)


def _name_of(module: Any) -> str:
    """The metric of a module, such as accuracy; its copies are the attributes `val_accuracy` and `test_accuracy`."""
    return str(module.objective.partition("/")[2])
