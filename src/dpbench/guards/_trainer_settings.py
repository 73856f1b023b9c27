"""Settings of a Lightning Trainer that would break the guarantee silently, refused before training."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import GradientAccumulationScheduler

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import LightningGuard
from dpbench.guards.packages import classes, ddp_strategies, overrides
from dpbench.guards.precision import refuse_precision


class TrainerSettings(LightningGuard):
    """Settings by which Lightning would change gradients and batches unseen by the mechanism."""

    name = "trainer"
    prevents = "the Trainer rescales, averages or clips gradients, shards parameters, or skips batches"

    def on_check(self) -> None:
        """Refuse settings of gradients."""
        refuse_trainer_settings(self.trainer, self.session.training.module)

    def on_begin(self) -> None:
        """Refuse settings that drop batches."""
        trainer: Any = self.trainer
        limit = trainer.limit_train_batches
        if isinstance(limit, int) or limit != 1.0 or trainer.overfit_batches:
            raise ConfigurationError(
                "limit_train_batches, overfit_batches and fast_dev_run drop batches: set max_steps instead."
            )

    def on_open(self, batch: Any) -> None:
        """Refuse another loader, and keep DDP from averaging gradients: sums are added when they are released."""
        refuse_accumulation(self.trainer)
        if self.trainer.train_dataloader is not self.session.loader:
            raise ConfigurationError(
                "the training loader was replaced during the run (reload_dataloaders_every_n_epochs?), but the ledger "
                "covers batches of the first one only: use one PrivateDataLoader throughout."
            )
        if isinstance(self.trainer.strategy, ddp_strategies()):
            assert self.trainer.strategy.model is not None
            self.trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[assignment]


def refuse_accumulation(trainer: pl.Trainer) -> None:
    """Raise ConfigurationError where gradients of several batches are added up, now or later."""
    batches = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            batches += callback.scheduling.values()
    if max(batches) > 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={max(batches)} rescales the loss, so that clipping is wrong: leave it at 1, and "
            "set max_physical_batch_size for batches that do not fit into memory (users are trained one by one anyway)."
        )


def refuse_trainer_settings(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse settings by which Lightning would change gradients unseen by the mechanism.

    Raises:
        ConfigurationError: Names the setting and the remedy.
    """
    refuse_accumulation(trainer)
    if trainer.gradient_clip_val:
        raise ConfigurationError(
            "gradient_clip_val clips the released gradient, not each record: leave it out and set max_grad_norm."
        )
    refuse_precision(trainer.precision)
    if not _is_supported(trainer.strategy):
        raise ConfigurationError(
            f"{type(trainer.strategy).__name__} is not supported: per-record gradients need whole parameters on each "
            "device; use a single device or strategy=ddp."
        )
    if overrides(module, "backward"):
        raise ConfigurationError(f"{type(module).__name__} overrides backward, which the private strategy replaces.")
    if overrides(module, "configure_gradient_clipping"):
        raise ConfigurationError(
            f"{type(module).__name__} overrides configure_gradient_clipping: the strategy clips; remove it."
        )


def _is_supported(strategy: object) -> bool:
    supported = classes("SingleDeviceStrategy", "strategies") + ddp_strategies()
    own_backward = classes("DeepSpeedStrategy", "strategies")  # though derived from DDPStrategy
    return isinstance(strategy, supported) and not isinstance(strategy, own_backward)
