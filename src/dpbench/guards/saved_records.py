"""Records that would be saved with a model: in hyperparameters, and in buffers that hold the training set."""

from __future__ import annotations

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


class SavedRecords(Guard):
    """Hyperparameters and buffers that hold the training set."""

    name = "saved records"
    prevents = "records are saved with the model: in hyperparameters, or in buffers that hold the training set"

    def on_begin(self) -> None:
        """Compare what is saved with the data set."""
        if self.session.releases.recipe.private:
            refuse_saved_records(self.session.training, self.session.loader.dataset)


def refuse_saved_records(training: Training, dataset: Any) -> None:
    """Refuse hyperparameters and buffers that hold records: every checkpoint and export would.

    Raises:
        ConfigurationError: Names the entry and the remedy.
    """
    module = training.module
    owners = {"self.hparams": module, "hparams of the data module": training.datamodule}
    for owner, one in owners.items():
        for name, value in (vars(one).get("_hparams") or {}).items() if one is not None else ():
            if isinstance(value, Dataset | DataLoader) or _holds_arrays_of(value, dataset):
                raise ConfigurationError(
                    f"{owner} hold {name} ({type(value).__name__}), and with it training records, which every "
                    f"checkpoint would save as they are: call save_hyperparameters(ignore=[{name!r}])."
                )
    for name, buffer in module.named_buffers():
        if _holds_arrays_of(buffer, dataset):
            raise ConfigurationError(
                f"the buffer {name} holds training records, which every checkpoint would save as they are: keep them "
                "out of the module."
            )


def _holds_arrays_of(value: Any, dataset: Any) -> bool:
    """Whether a value holds an array of a data set: the same memory, or equal contents of more than one number."""
    mine = [x for x in _arrays(value, _DEEP) if x.size > 1]
    return bool(mine) and any(_is_same(one, other) for other in _arrays(dataset, _DEEP) for one in mine)


def _is_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    if np.may_share_memory(one, other):
        return True
    return one.shape == other.shape and one.dtype == other.dtype and bool(np.array_equal(one, other))


def _arrays(value: Any, depth: int) -> Iterator[NDArray[Any]]:
    """Tensors and arrays in containers and in attributes of data sets."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and value.device.type != "meta" and value.dtype != torch.bfloat16:
            yield value.detach().cpu().numpy()
    elif isinstance(value, np.ndarray):
        yield value
    elif depth:
        inner: Any = ()
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, list | tuple):
            inner = value[:100]
        elif isinstance(value, Dataset):
            inner = list(vars(value).values())
        for one in inner:
            yield from _arrays(one, depth - 1)
