"""Which run a call of `trainer.fit` belongs to: a new one, or the one that a ledger records already."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
from torch import nn

from dpbench.errors import ConfigurationError

_TRAINED: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()


def note_training(pl_module: pl.LightningModule, ledger: Path | None, releases: int) -> None:
    """Remember where the releases are recorded that a module's weights hold."""
    if releases and ledger is not None:
        _TRAINED[pl_module] = ledger


def goes_on(pl_module: pl.LightningModule, ledger: Path, last: Path | None) -> bool:
    """Whether a fit without a checkpoint goes on with the run that its strategy made before.

    Args:
        pl_module: To be trained.
        ledger: Where the releases would be recorded.
        last: Where those of the strategy's earlier fit are, None before it made any.

    Returns:
        True if the ledger is the same, so that epsilon is of all fits together; else a new run begins.

    Raises:
        ConfigurationError: The module holds releases that another ledger records, so that this one would not cover it.
    """
    if last is not None and ledger.resolve() == last.resolve():
        return True
    before = _TRAINED.get(pl_module)
    if before is not None and before.resolve() != ledger.resolve():
        raise ConfigurationError(
            f"this {type(pl_module).__name__} was trained privately before, and its weights hold what {before} "
            f"records, not {ledger}: make the module anew for a new run, or go on in that ledger (the same strategy "
            f"with ledger={str(before)!r}, or trainer.fit(..., ckpt_path=...))."
        )
    return False
