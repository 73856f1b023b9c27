"""How a user's batches get to the device, by Lightning's hooks, which a cohort has no use for."""

from __future__ import annotations

import functools
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities import move_data_to_device
from pytorch_lightning.utilities.model_helpers import is_overridden

from dpbench.data.users import Cohort

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LocalBatches:
    """Moves batches of local steps as Lightning moves those of a loader, and lets cohorts pass.

    Args:
        trainer: Has the device, the precision and perhaps a LightningDataModule.
        module: Trained. Its hooks, and the data module's, are replaced on these objects alone.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer, self._module = trainer, module
        owners: list[Any] = [x for x in (module, trainer.datamodule) if x is not None]  # type: ignore[attr-defined]
        self._hooked = any(is_overridden(name, x) for name in _HOOKS for x in owners)
        self._passing = [
            (x, name) for x in owners for name in _HOOKS if is_overridden(name, x) and name not in x.__dict__
        ]
        for owner, name in self._passing:
            owner.__dict__[name] = _unless_cohort(getattr(owner, name))

    def on_device(self, batch: Any) -> Any:
        """A batch of examples, where the module is."""
        batch = self._trainer.precision_plugin.convert_input(batch)
        if not self._hooked:  # what Lightning's own hooks come down to, in a fifth of the time
            return move_data_to_device(batch, self._module.device)
        batch = self._module._on_before_batch_transfer(batch)
        return self._trainer.strategy.batch_to_device(batch)

    def close(self) -> None:
        """Give the hooks back."""
        for owner, name in self._passing:
            owner.__dict__.pop(name, None)


def _unless_cohort(hook: Any) -> Any:
    @functools.wraps(hook)
    def wrapped(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch if isinstance(batch, Cohort) else hook(batch, *args, **kwargs)

    return wrapped
