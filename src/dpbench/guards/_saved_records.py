"""Records that would be saved with a model: in hyperparameters, and in buffers that hold the training set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard
from dpbench.records.training import Training

_DEEP = 4  # containers, and data sets inside of data sets
_MOST_ENTRIES = 100  # of a list that are looked into


class SavedRecords(Guard):
    """Hyperparameters and buffers that hold the training set."""

    name = "saved records"
    prevents = "records are saved with the model, in hyperparameters or buffers"

    def on_begin(self) -> None:
        """Compare the saved objects with the data set."""
        if self.session.releases.recipe.private:
            refuse_saved_records(self.session.training, self.session.loader.dataset)


def refuse_saved_records(training: Training, dataset: Any) -> None:
    """Refuse hyperparameters and buffers that hold records: every checkpoint and export would.

    Raises:
        ConfigurationError: Names the entry and the remedy.
    """
    module = training.module
    owners = {"self.hparams": module, "hparams of the data module": training.datamodule}
    for owner, holder in owners.items():
        hparams = {} if holder is None else vars(holder).get("_hparams") or {}
        for name, value in hparams.items():
            if isinstance(value, Dataset | DataLoader) or _holds_arrays_of(value, dataset):
                raise ConfigurationError(
                    f"{owner} contain training records in {name} ({type(value).__name__}), which every checkpoint "
                    f"would save: call save_hyperparameters(ignore=[{name!r}])."
                )
    for name, buffer in module.named_buffers():
        if _holds_arrays_of(buffer, dataset):
            raise ConfigurationError(
                f"the buffer {name} contains training records, which every checkpoint would save: keep them out of the "
                "module."
            )


def _holds_arrays_of(value: Any, dataset: Any) -> bool:
    """Return whether a value holds an array of a data set: the same memory, or equal contents of several numbers."""
    arrays = [x for x in _arrays(value, _DEEP) if x.size > 1]
    pairs = itertools.product(arrays, _arrays(dataset, _DEEP) if arrays else ())
    return any(np.may_share_memory(x, y) or (x.dtype == y.dtype and np.array_equal(x, y)) for x, y in pairs)


def _arrays(value: Any, depth: int) -> Iterator[NDArray[Any]]:
    """Tensors and arrays in containers and in attributes of data sets.

    Args:
        value: Looked into.
        depth: How many containers inside of each other are looked into.
    """
    if isinstance(value, Tensor):
        has_data = value.layout == torch.strided and value.device.type != "meta"
        if has_data and value.dtype != torch.bfloat16:  # which NumPy does not know
            yield value.detach().cpu().numpy()
    elif isinstance(value, np.ndarray):
        yield value
    elif depth and isinstance(value, Dataset | Mapping | list | tuple):
        parts = vars(value) if isinstance(value, Dataset) else value
        for part in parts.values() if isinstance(parts, Mapping) else parts[:_MOST_ENTRIES]:
            yield from _arrays(part, depth - 1)
