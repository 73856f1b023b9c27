"""The baseline without privacy."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from dpbench.callback.lightning_training import count_batches
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import require_examples
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError


class NonPrivate(pl.Callback):
    """Ordinary training: same data, model, loop and results as the private strategies, epsilon infinite.

    Raises:
        ConfigurationError: An option was given; it has none.
    """

    default_sampling = "shuffled"

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__()
        self._lots: PrivateBatchSampler | None = None
        if values or options:
            raise ConfigurationError(
                f"NonPrivate takes no options, such as {', '.join(options) or repr(values[0])}: leave them out (for "
                "records other than examples, use FederatedAveraging(records=...))."
            )

    def __repr__(self) -> str:
        return "NonPrivate()"

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse options that only private strategies know.

        Raises:
            ConfigurationError: Several networks (a GAN) in several processes: each would draw noise of its own.
        """
        if trainer.world_size > 1 and getattr(pl_module, "private_module", None) is not None:
            raise ConfigurationError(
                f"{type(pl_module).__name__} without privacy trains in one process: trainer.devices=1."
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take batches over, if the data come in batches."""
        if isinstance(trainer.train_dataloader, PrivateDataLoader):
            require_examples(trainer.train_dataloader.dataset)
            lots = trainer.train_dataloader.lots
            lots.acquire()
            self._lots = lots  # not before: those of another training are not freed
            lots.plan(trainer.estimated_stepping_batches)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Train as many batches as a private training does."""
        count_batches(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the batches, which may be drawn without this callback again."""
        if self._lots is not None:  # else they are another training's
            self._lots.free()
            self._lots = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the batches also after an error."""
        self.teardown(trainer, pl_module, "fit")
