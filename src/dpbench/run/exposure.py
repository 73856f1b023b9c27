"""How much a model remembers of records that were inserted into its training data (Carlini et al. 2018).

The result is of single private records, without noise: it is named `nonprivate/…`, and there only where `data.inserted`
asks for it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.runs.folder import RunFolder

Losses = NDArray[np.float64]


def exposures(losses: Losses, references: Losses) -> Losses:
    """Exposure of records by their losses: log2 of the number of candidates minus log2 of the rank, in bits.

    The candidates are the record itself and the references; the record with the smallest loss has rank 1. A reference
    with the same loss ranks before the record, so that no exposure is overstated. Source: Carlini et al. 2018,
    section 4.3, with the candidates drawn at random instead of all that there are.

    Args:
        losses: Of the records, (N,).
        references: Of records drawn alike that were not trained on, (R,).

    Returns:
        (N,); from 0 to log2(R + 1).

    >>> exposures(np.array([0.1, 0.9, 0.4]), np.array([0.2, 0.4, 0.8])).tolist()
    [2.0, 0.0, 0.41503749927884376]
    """
    ordered = np.sort(np.where(np.isnan(references), -np.inf, references))
    losses = np.where(np.isnan(losses), np.inf, losses)  # of a model that diverged: nothing is remembered
    rank = 1 + np.searchsorted(ordered, losses, side="right")
    found: Losses = np.log2(len(references) + 1) - np.log2(rank)
    return found


def exposure_by_chance(references: int) -> float:
    """Mean exposure of a record that was not trained on: each rank is equally likely. Close to log2 e = 1.44 bits.

    Args:
        references: Their number R.

    >>> round(exposure_by_chance(4096), 3)
    1.441
    """
    candidates = references + 1
    return math.log2(candidates) - math.lgamma(candidates + 1) / candidates / math.log(2)


class Exposure(pl.Callback):
    """Measures, at the final test, the exposure of the records that the data module inserted.

    Logged are `nonprivate/exposure_mean`, `nonprivate/exposure_max`, and `nonprivate/exposure_by_chance`, the mean
    of records that nobody remembers.

    Args:
        folder: Of the run, where a line for each record is written; None writes none.
    """

    def __init__(self, folder: RunFolder | None = None) -> None:
        super().__init__()
        self._folder = folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a module of which no loss of single records is known.

        Raises:
            ConfigurationError: It has no `losses`.
        """
        if not hasattr(pl_module, "losses"):
            raise ConfigurationError(
                f"data.inserted compares losses of single records, and {type(pl_module).__name__} has no losses(batch) "
                "for it, as ImageClassifier and NextToken have: leave the words data.inserted out."
            )

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure, with the final weights."""
        module: Any = pl_module
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        found, losses, references = [], [], 0
        for inserted, others in data.inserted_and_references():
            own, of_others = self._losses(trainer, module, inserted), self._losses(trainer, module, others)
            losses.append(own)
            found.append(exposures(own, of_others))
            references = len(of_others)
        every = np.concatenate(found)
        module.log_dict(
            {
                "nonprivate/exposure_mean": float(every.mean()),
                "nonprivate/exposure_max": float(every.max()),
                "nonprivate/exposure_by_chance": exposure_by_chance(references),
            }
        )
        if self._folder is not None and trainer.is_global_zero:
            table = pd.DataFrame({"loss": np.concatenate(losses), "references": references, "exposure": every})
            write_atomically(self._folder.exposure, table.to_csv(index_label="record"))

    def _losses(self, trainer: pl.Trainer, module: Any, loader: DataLoader[Any]) -> Losses:
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            parts = [module.losses(trainer.strategy.batch_to_device(batch)).double().cpu() for batch in loader]
        return np.asarray(torch.cat(parts))
