"""The records of a data set: their kind and number, that each is there once, and whole batches of them."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from dpbench.errors import ConfigurationError

ITEM = "item"
"""Unit of a data set of which nothing else is known."""
_ANY_ITEM = ("example", ITEM, "block")


class Collated(Sequence[Any]):
    """Return value of a data set's `__getitems__(positions)` that indexes whole batches faster than samples.

    For torch (its `DataLoader`, `Subset`, `random_split`) it is the sequence of samples that the protocol asks for;
    `PrivateDataLoader` takes the batch as it is.

    Args:
        batch: Tensors with records in dimension 0, in lists, tuples and dictionaries.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(tree_leaves(self.batch)[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Collated(tree_map(lambda x: x[index], self.batch))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return tree_map(lambda x: x[index], self.batch)


class InBatches(Dataset[tuple[Tensor, ...]]):
    """Base of data sets in memory that index whole batches: an item is a batch of one record, without its dimension.

    A subclass has `__len__` and `batch_of`.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def batch_of(self, positions: Sequence[int]) -> Collated:
        """Return the batch of some records, a tuple of tensors."""
        raise NotImplementedError

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        return self.batch_of(positions)

    def __getitem__(self, position: int) -> tuple[Tensor, ...]:
        # The range counts a negative position from the end, and raises IndexError, by which an iteration ends.
        batch = self.batch_of([range(len(self))[position]]).batch
        return tuple(part[0] for part in batch)


class Rows(InBatches):
    """Tensors in memory with examples in dimension 0; whole batches are one indexed copy.

    Args:
        *tensors: All of one length.
    """

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(tensor) for tensor in tensors}) != 1:
            raise ConfigurationError(f"tensors of examples differ in length: {[len(tensor) for tensor in tensors]}.")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch_of(self, positions: Sequence[int]) -> Collated:
        """Return the batch of some records, a tuple of tensors."""
        index = torch.as_tensor(positions, dtype=torch.long)
        return Collated(tuple(tensor.index_select(0, index) for tensor in self.tensors))


class Cohort(NamedTuple):
    """A batch given by the positions of its records: the record source reads the examples of each in turn.

    Attributes:
        positions: Positions in the data set, (R,), int64.
    """

    positions: Tensor


class RecordsOfExamples(Dataset[Cohort]):
    """Base of data sets with several examples in each record: a batch holds their positions.

    `subset(positions)` of a subclass gives some of the records, with all of their examples.

    Attributes:
        unit: The entity that a record is.
        source: The option of a strategy by which it trains such records.
    """

    unit: str
    source: str

    @abstractmethod
    def __len__(self) -> int:
        """Number of records."""

    def __getitem__(self, position: int) -> Cohort:
        return Cohort(torch.tensor(range(len(self))[position]))

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        return Collated(Cohort(torch.as_tensor(positions, dtype=torch.long)))

    @property
    @abstractmethod
    def examples(self) -> Dataset[Any]:
        """The examples of all records (of a subset: of others, too)."""

    @abstractmethod
    def rows_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of the examples of some records in `examples`."""

    @abstractmethod
    def watch(self) -> None:
        """Look on while examples are read, for a private training: none may stand in for another one."""


def count_of(dataset: Any) -> int:
    """Number of records of a map-style data set.

    Raises:
        ConfigurationError: It has no length, or no positions to draw from.
    """
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        size = -1
    if size < 0 or not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            f"{type(dataset).__name__} is not a map-style data set: batches require len(dataset) and "
            "dataset[position], which a stream (IterableDataset) does not have."
        )
    return size


def refuse_repeated(dataset: Any) -> None:
    """Raise ConfigurationError where a Subset or ConcatDataset holds a record of a data set more than once."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    positions_of: dict[int, list[NDArray[np.int64]]] = {}
    for origin, positions in _origins(dataset, None):
        positions_of.setdefault(id(origin), []).append(positions)
    for parts in positions_of.values():
        positions = np.concatenate(parts)
        repeated = len(positions) - len(np.unique(positions))
        if repeated:
            raise ConfigurationError(
                f"{repeated} of the {count_of(dataset)} training records are repeated (in a Subset or ConcatDataset), "
                "and epsilon protects one row: a record with several rows is protected less. Keep each record once."
            )


def refuse_split(dataset: Any) -> None:
    """Raise ConfigurationError for a Subset (as of `random_split`) of records that have lost their examples in it."""
    records = dataset
    while isinstance(records, Subset):
        records = records.dataset
    if records is not dataset and isinstance(records, RecordsOfExamples):
        raise ConfigurationError(
            f"a Subset of {records.unit}s (such as from random_split) loses their examples: use "
            f"{type(records).__name__}.subset(positions) with the Subset's indices."
        )


def require_examples(dataset: Any) -> None:
    """Raise ConfigurationError where a record of a data set has several examples, and examples are wanted."""
    if isinstance(dataset, RecordsOfExamples):
        unit = dataset.unit
        raise ConfigurationError(
            f"the items of the data set are {unit}s: train by {unit}, with {dataset.source}, or on dataset.examples "
            f"(data.unit=example), which protects an example instead of a {unit}. Without privacy, train {unit}s with "
            "dpbench.strategies.FederatedAveraging."
        )


def ask_for_unit(dataset: Any, unit: str) -> None:
    """Warn where the ledger is to state a unit of which the data set says nothing: epsilon holds for an item of it."""
    if unit not in _ANY_ITEM and not hasattr(dataset, "unit"):
        name = type(dataset).__name__
        warnings.warn(
            f"unit={unit!r} requires that each item of the {name} contains all data of one {unit}: set dataset.unit = "
            f"{unit!r} if so. Epsilon holds for an item: where a {unit} has several, group them "
            "(docs/users.md).",
            stacklevel=4,
        )


def shared_records(one: Any, other: Any) -> int:
    """Number of records of a data set that another one has too: both are it, or Subsets or ConcatDatasets of it.

    Of records with several examples it is that of the examples.
    """
    sized = [dataset for dataset in (one, other) if hasattr(dataset, "__len__")]
    if len(sized) < 2:
        return 0
    mine, theirs = ({id(origin): rows for origin, rows in _origins(dataset, None)} for dataset in sized)
    return sum(len(np.intersect1d(rows, theirs[key])) for key, rows in mine.items() if key in theirs)


def _origins(dataset: Any, rows: NDArray[np.int64] | None) -> Iterator[tuple[Any, NDArray[np.int64]]]:
    """Underlying data sets, each with the positions of its records among `rows` (None: all)."""
    rows = np.arange(count_of(dataset)) if rows is None else rows
    if isinstance(dataset, Subset):
        inner = np.asarray(dataset.indices, dtype=np.int64)[rows]
        yield from _origins(dataset.dataset, inner % count_of(dataset.dataset))
    elif isinstance(dataset, ConcatDataset):
        ends = np.asarray(dataset.cumulative_sizes)
        which = np.searchsorted(ends, rows, side="right")
        for number, part in enumerate(dataset.datasets):
            yield from _origins(part, rows[which == number] - (ends[number - 1] if number else 0))
    elif isinstance(dataset, RecordsOfExamples):
        yield from _origins(dataset.examples, dataset.rows_of(rows))
    else:
        yield dataset, rows
