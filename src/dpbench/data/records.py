"""The records of a data set: how many there are, that each is there once, and how those of a lot become a batch."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate

from dpbench.data.mixing import Rows, collated, random_numbers_kept, refuse_mixing
from dpbench.data.octaves import is_checked
from dpbench.data.refilling import has_equal_rows, refuse_refilling
from dpbench.data.separate_records import MOST_TOGETHER, SeparateRecords, has_rows, sizes_agree
from dpbench.errors import ConfigurationError, brief

_FEW = 2  # records that say nothing of the others
_ALONE = (
    "the records of a lot make no rows of one batch, so that each is collated alone, and the collate_fn fails on a "
    "list of one: {error}. Let it make one row for each record, or take one record alone."
)
_TWINS = 16  # lots with equal rows of which each is checked; of later ones, one of each octave


class Collated(Sequence[Any]):
    """What a data set's `__getitems__(positions)` may return if it indexes whole batches faster than samples.

    For torch (its `DataLoader`, `Subset`, `random_split`) it is the sequence of samples that the protocol asks for;
    `LotLoader` takes the batch as it is.

    Args:
        batch: Tensors whose dimension 0 is the records, in lists, tuples and dictionaries.
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


class Collation:
    """Collates as torch does, and knows what an empty lot looks like.

    Args:
        dataset: Of which one record shows the shapes.
        collate_fn: As for `torch.utils.data.DataLoader`; None takes torch's.
        rows: Rows of a record in a batch, where records must not be mixed; None: they may.

    Attributes:
        ordered: Whether the order of rows matters, too.
        may_separate: Whether records may be collated alone, where those of a lot make no rows.
    """

    ordered = False
    may_separate = False

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[Any], Any] | None,
        rows: Rows | None = None,
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._rows = rows
        self._calls = 0
        self._with_twins = 0
        self._separates: bool | None = None
        self._separated = 0

    @property
    def given(self) -> bool:
        """Whether it is another one than torch's."""
        return self._collate is not default_collate

    def __call__(self, records: Any) -> Any:
        if not self.given:
            if isinstance(records, Collated):
                return records.batch
            if not isinstance(records, list):
                raise ConfigurationError(
                    f"{type(self._dataset).__name__}.__getitems__ returns a {type(records).__name__}: torch's protocol "
                    "is a list of samples. Return that, or dpbench.data.records.Collated(batch) for a whole batch, or "
                    "give a collate_fn."
                )
        if self.may_separate and isinstance(records, list):
            return self._rows_or_separate(records)
        return self._together(records)

    def _together(self, records: Any) -> Any:
        """The batch of all records of a lot."""
        if isinstance(records, list) and not records:
            record = self._dataset[0]
            return _emptied(self._collate([record]), self._collate([record, record]))
        if self._rows is not None and self.given and len(records) > _FEW:
            return self._checked(records, self._rows)
        return self._collate(records)

    def _rows_or_separate(self, records: list[Any]) -> Any:
        """The batch of a lot where records are its rows, else a batch of each record."""
        if self._separates is None:
            self._separates = self.given and not self._makes_rows(records)  # torch's makes them, or fails
        if self._separates:
            return self._separate(records)
        before = [copy.copy(record) for record in records] if self.given else records
        try:
            batch = self._together(records)
        except ConfigurationError:
            raise
        except Exception as error:  # ragged records, or a fault of its own
            try:
                return self._separate(before)
            except ConfigurationError:
                raise error from None
        if self.given and not sizes_agree(batch, len(records)):
            return self._separate(before)
        return batch

    def _makes_rows(self, records: list[Any]) -> bool:
        """Whether a batch of two records has a row for each; asked once."""
        two = records[:2]
        if len(two) < 2:  # nothing can be told of one
            with random_numbers_kept():
                two = [self._dataset[0]] * 2
        try:
            one = collated(self._collate, two[:1])
        except Exception:
            return True  # the lot itself says what is wrong
        try:
            batch = collated(self._collate, two)
        except Exception:
            return False
        return has_rows(batch, 2, one)

    def _separate(self, records: list[Any]) -> SeparateRecords:
        """A batch of each record, and now and then one of the first few."""
        self._separated += 1
        together = None
        if len(records) >= 2 and is_checked(self._separated):
            with suppress(Exception):  # ragged records cannot be
                together = collated(self._collate, records[:MOST_TOGETHER])
        try:
            return SeparateRecords([self._collate([record]) for record in records], together)
        except Exception as error:
            raise ConfigurationError(_ALONE.format(error=brief(error))) from error

    def _checked(self, records: Any, rows: Rows) -> Any:
        """The batch of a collate_fn that must not mix records, nor repeat one."""
        self._calls += 1
        if is_checked(self._calls):
            refuse_mixing(self._collate, records, self._calls, rows, self.ordered)
        if not isinstance(records, list):
            return self._collate(records)
        before = [copy.copy(record) for record in records]  # a collate_fn may take its records apart
        batch = self._collate(records)
        if has_equal_rows(batch):
            self._with_twins += 1
            if self._with_twins <= _TWINS or is_checked(self._with_twins):
                refuse_refilling(self._collate, before)
        return batch


def _emptied(one: Any, two: Any) -> Any:
    """A batch without records, from one of one record and one of two: what grows with the records becomes empty."""
    if getattr(one, "shape", ()):
        return one[:0]
    if isinstance(one, UserDict | dict):
        empty = {key: _emptied(value, two[key]) for key, value in one.items()}
        return type(one)(empty) if isinstance(one, UserDict) else empty
    if is_dataclass(one) and not isinstance(one, type):
        return replace(one, **{f.name: _emptied(getattr(one, f.name), getattr(two, f.name)) for f in fields(one)})
    if isinstance(one, list | tuple):
        if len(one) != len(two):  # an entry for each record, such as its text
            return type(one)()
        parts = [_emptied(a, b) for a, b in zip(one, two, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    return one


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
            f"{type(dataset).__name__} has no positions to draw records from, as a stream (IterableDataset) has none: "
            "lots need a map-style data set, with len(dataset) and dataset[position]."
        )
    return size


def refuse_repeated(dataset: Any) -> None:
    """Raise ConfigurationError where a Subset or ConcatDataset holds a record of a data set more than once."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    found: dict[int, list[NDArray[np.int64]]] = {}
    for origin, positions in _origins(dataset, None):
        found.setdefault(id(origin), []).append(positions)
    for parts in found.values():
        positions = np.concatenate(parts)
        repeated = len(positions) - len(np.unique(positions))
        if repeated:
            raise ConfigurationError(
                f"{repeated} of the {count_of(dataset)} records of the training data are there twice (in a Subset or "
                "ConcatDataset): epsilon holds for a row, and a record with several rows is protected less. Keep each "
                "record once."
            )


def shared_records(one: Any, other: Any) -> int:
    """Number of records of a data set that another one has too: both are it, or Subsets or ConcatDatasets of it.

    Of users it is that of their examples.
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
    elif hasattr(dataset, "rows_of"):  # users: the records of a person are its examples
        yield from _origins(dataset.examples, dataset.rows_of(rows))
    else:
        yield dataset, rows
