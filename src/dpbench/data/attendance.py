"""Whether a private strategy releases the lots that are drawn: a loop that ignores it would train without privacy."""

from __future__ import annotations

import sys

from dpbench.errors import ConfigurationError

_TRAINING = tuple(f"{package}.loops.fit_loop" for package in ("pytorch_lightning", "lightning.pytorch"))
_EVALUATION = tuple(f"{package}.loops.evaluation_loop" for package in ("pytorch_lightning", "lightning.pytorch"))
_FABRIC = ("lightning_fabric.wrappers", "lightning.fabric.wrappers")


def refuse_unattended(in_use: bool) -> None:
    """Refuse lots to a caller that would train on them without a strategy; the call stack shows who asks.

    Args:
        in_use: Whether a strategy has taken the loader over.

    Raises:
        ConfigurationError: Lightning Fabric, which knows no strategy; or a Trainer's training without one.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module in _FABRIC:
            raise ConfigurationError(
                "a LotLoader is of no use to Lightning Fabric: nothing would make its lots private. Use a Lightning "
                "Trainer with a private strategy among its callbacks; for training without privacy, use a DataLoader."
            )
        if module in _EVALUATION or (module in _TRAINING and in_use):
            return
        if module in _TRAINING:
            raise ConfigurationError(
                "a LotLoader trains without a strategy, so without privacy: add callbacks=[strategy] to the trainer "
                "(dpbench.DPSGD, ...; dpbench.strategies.NonPrivate() where privacy is not wanted). If there is one, "
                "the training loader was replaced in mid-run (reload_dataloaders_every_n_epochs?), or hooks of the "
                "strategy did not run (a subclass that overrides one must call super()'s)."
            )
        frame = frame.f_back  # type: ignore[assignment]
