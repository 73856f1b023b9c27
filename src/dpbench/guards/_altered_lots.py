"""Lots made of one lot, on which a record's gradient must be the same: parts of it, other orders, other records."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpbench.data.lots import RecordOfRow
from dpbench.data.separate_records import SeparateRecords
from dpbench.records.grouping import counted_from_zero, map_tensors, places_of_index
from dpbench.records.physical_batches import select

Rows = NDArray[np.int64]
"""Rows, or names of records."""

_EXTREME = 1e6


class AlteredLot(NamedTuple):
    """A lot for one run.

    Attributes:
        batch: Its tensors.
        places: For each row the row of the whole lot whose place it has: its number and its random numbers, shape (R,).
    """

    batch: Any
    places: Rows

    def positions(self, rows: Rows) -> Rows:
        """Where some rows of the whole lot are in this one; -1 for a row that it does not hold."""
        last = max(self.places.max(), rows.max())
        positions = np.full(last + 1, -1)
        positions[self.places] = np.arange(len(self.places))
        return positions[rows]


class LotRows:
    """The rows of one lot, or of the piece of it that is run at once.

    Args:
        batch: Holds them.
        rows: Number of its rows.
        chosen: Those of the piece, ascending, shape (R,).
        record_of: Record (or microbatch) of each of these, shape (R,).
        index: What says `record_of` of a batch: an entry's name, or a function; None: nothing does.
    """

    def __init__(
        self,
        batch: Any,
        rows: int,
        chosen: Rows,
        record_of: Rows,
        index: RecordOfRow | None,
    ) -> None:
        self._batch = batch
        self._rows = rows
        self._chosen = chosen
        self.record_of = record_of
        self._every_row = np.arange(len(chosen))
        self._index_places: Container[int] = ()
        if index is not None:
            self._index_places = places_of_index(batch, rows, index)

    def whole(self) -> AlteredLot:
        """The lot as it is."""
        return self._lot(self._every_row)

    def of(self, names: Rows) -> Rows:
        """Rows of some records, ascending."""
        return np.flatnonzero(np.isin(self.record_of, names))

    def part(self, names: Rows) -> AlteredLot:
        """Some records alone, in the order of `names`; the rows of a record stay together, as they were."""
        rows = [self._rows_of(name) for name in names]
        return self._lot(np.concatenate(rows))

    def replaced(self, kept: Rows) -> AlteredLot:
        """The lot with kept records in the place of all others.

        Each of the others becomes the kept record before it (the first one, where there is none), so that what is
        sorted stays sorted.
        """
        is_kept = np.isin(self.record_of, kept)
        kept_rows = np.where(is_kept, self._every_row, -1)
        last_kept = np.maximum.accumulate(kept_rows)
        last_kept[last_kept < 0] = np.argmax(is_kept)  # the first
        contents = self._every_row.copy()
        for name in np.setdiff1d(self.record_of, kept):
            rows = self._rows_of(name)
            kept_before = self.record_of[last_kept[rows[0]]]
            stand_in = self._rows_of(kept_before)
            contents[rows] = np.resize(stand_in, len(rows))  # repeats a record of fewer rows
        return self._lot(contents, self._every_row)

    def extreme(self, lot: AlteredLot, name: int) -> AlteredLot:
        """A lot of the same places, with a record a million times as large."""

        def enlarged(x: Tensor) -> Tensor:
            is_zero = (x == 0).all()  # and stays zero, however large the factor
            larger = torch.where(is_zero, _EXTREME, x * _EXTREME)
            return larger.to(x.dtype)

        if isinstance(lot.batch, SeparateRecords):
            numbers = lot.batch.mapped(lambda one: tree_map(lambda x: enlarged(x) if _is_float(x) else x, one))
            return AlteredLot(numbers, lot.places)
        return self._changed(lot, name, enlarged)

    def without_numbers(self, name: int, exchanged: bool) -> AlteredLot:
        """The lot with a record of NaN, whose whole numbers may be another record's."""
        donor = None
        if exchanged:
            donors = np.flatnonzero(self.record_of != name)
            donor = int(donors[0])

        def nan(x: Tensor) -> Tensor:
            return torch.full_like(x, math.nan)

        return self._changed(self.whole(), name, nan, donor)

    def has_floats(self) -> bool:
        """Whether there is anything that can be NaN."""
        floats = filter(_is_float, self._tensors())
        return any(_has_rows(x, self._rows) for x in floats)

    def longest(self) -> Rows:
        """Records that hold the largest of whole numbers that each row has one of, such as the lengths of texts."""
        rows = torch.from_numpy(self._chosen)
        records = []
        for x in self._tensors():
            if self._is_column(x) and not x.is_complex():
                numbers = x.cpu()[rows].int()
                row = int(numbers.argmax())
                records.append(self.record_of[row])
        return np.unique(records)

    def _rows_of(self, name: int) -> Rows:
        return np.flatnonzero(self.record_of == name)

    def _tensors(self) -> list[Tensor]:
        return [x for x in tree_leaves(self._batch) if isinstance(x, Tensor)]

    def _is_column(self, x: Tensor) -> bool:
        """Whether a tensor of the batch holds one number for each row that is no floating-point one."""
        return x.shape == (self._rows,) and not x.is_floating_point()

    def _lot(self, contents: Rows, places: Rows | None = None) -> AlteredLot:
        """A lot of some rows, which may have the places of others.

        Args:
            contents: Row of the piece for each row.
            places: Row of the piece whose place it has; None: its own.
        """
        if places is None:
            places = contents
        batch = select(self._batch, self._rows, self._chosen[contents])
        if self._index_places:
            batch = counted_from_zero(batch, self._index_places, self.record_of[places])
        return AlteredLot(batch, places)

    def _changed(
        self,
        lot: AlteredLot,
        name: int,
        change: Callable[[Tensor], Tensor],
        donor: int | None = None,
    ) -> AlteredLot:
        """A lot in which one record is changed.

        Args:
            lot: Before the change.
            name: The record.
            change: Of its floating-point numbers.
            donor: Row whose whole numbers it gets; None: it keeps its own.
        """
        is_changed = self.record_of[lot.places] == name
        rows = torch.from_numpy(np.flatnonzero(is_changed))

        def changed(x: Tensor, is_index: bool) -> Tensor:
            if not _has_rows(x, len(lot.places)):
                return x
            places = rows.to(x.device)
            if _is_float(x):
                values = change(x[places])
            elif donor is None or is_index:
                return x
            else:
                values = x[donor].expand(len(rows), *x.shape[1:])
            # In the layout of x (images are often channels last): for another one layers have other kernels, which
            # round otherwise, and an activation near 0 that changes its sign changes a gradient by far more.
            return x.clone().index_copy_(0, places, values)

        return AlteredLot(map_tensors(lot.batch, self._index_places, changed), lot.places)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _has_rows(x: Tensor, count: int) -> bool:
    return x.dim() > 0 and len(x) == count
