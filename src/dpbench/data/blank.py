"""Batches that hold nothing of the records but their shapes: for what must be measured without looking at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, Subset, TensorDataset

from dpbench.data.collation import Collation
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError

_OWN = "dpbench.data."
_SEED = 0
_UNKNOWN_SHAPES = (
    "max_physical_batch_size=auto measures made-up rows of the records' shape, and {subject} may give each record "
    "another one, which is private: give a number instead (or, of fixed shapes, a TensorDataset without a collate_fn)."
)


def blank_batch(loader: LotLoader, rows: int) -> Any:
    """A batch of so many rows as the loader makes them: uniform noise in the place of floats, zeros of other numbers.

    It is the same whatever the records hold, since all of them have one shape.

    Args:
        loader: Of a `TensorDataset`, or of a data set of this package; its records become rows as torch makes them.
        rows: Its rows.

    Raises:
        ConfigurationError: The records may have several shapes.
    """
    dataset = loader.dataset
    _require_one_shape(loader)
    if hasattr(dataset, "begin_lot"):  # the next lot is begun with random numbers of its own
        dataset.begin_lot(np.random.default_rng(_SEED))
    records: Any = dataset.__getitems__([]) if hasattr(dataset, "__getitems__") else []
    empty = loader.collate_fn(records)
    generator = torch.Generator().manual_seed(_SEED)

    def filled(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # Strides too: what a convolution computes with depends on the layout.
        shape = (rows, *x.shape[1:]) if x.dim() else ()
        blank = torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=x.device)
        return blank.uniform_(generator=generator) if x.is_floating_point() else blank.zero_()

    return tree_map(filled, empty)


def _require_one_shape(loader: LotLoader) -> None:
    """Raise ConfigurationError where the shape of a batch may tell more of records than their number."""
    collation = loader.collate_fn
    if not isinstance(collation, Collation) or collation.is_custom:
        raise ConfigurationError(_UNKNOWN_SHAPES.format(subject="a collate_fn"))
    dataset: Dataset[Any] = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset and not type(dataset).__module__.startswith(_OWN):
        raise ConfigurationError(_UNKNOWN_SHAPES.format(subject=f"a {type(dataset).__name__}"))
