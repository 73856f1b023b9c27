"""Lots made of one lot, on which a record's gradient must be the same: parts of it, other orders, other records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpbench.records.physical_batches import select

Rows = NDArray[np.int64]
_EXTREME = 1e6


class AlteredLot(NamedTuple):
    """A lot for one run.

    Attributes:
        batch: Its tensors.
        places: For each row the row of the whole lot whose place it has: its number and its random numbers.
    """

    batch: Any
    places: Rows

    def positions(self, rows: Rows) -> Rows:
        """Where some rows of the whole lot are."""
        where = np.full(max(int(self.places.max()), int(rows.max())) + 1, -1)
        where[self.places] = np.arange(len(self.places))
        return where[rows]


class LotRows:
    """The rows of one lot, or of the piece of it that is run at once.

    Args:
        batch: Holds them.
        rows: Number of its rows.
        chosen: Those of the piece, ascending.
        record_of: Record (or microbatch) of each of these.
        index: Name of the entry of the batch that is `record_of`; "": any may be; None: none is.
    """

    def __init__(self, batch: Any, rows: int, chosen: Rows, record_of: Rows, index: str | None) -> None:
        self._batch, self._rows, self._chosen = batch, rows, chosen
        self.record_of = record_of
        self._numbers = frozenset[int]() if index is None else self._numbering(index)
        self.everything = np.arange(len(chosen))

    def whole(self) -> AlteredLot:
        """As it is."""
        return self._lot(self.everything)

    def of(self, names: Rows) -> Rows:
        """Rows of some records, ascending."""
        return np.flatnonzero(np.isin(self.record_of, names))

    def part(self, names: Rows) -> AlteredLot:
        """Some records alone, in the order of `names`; the rows of a record stay together, as they were."""
        return self._lot(np.concatenate([np.flatnonzero(self.record_of == name) for name in names]))

    def replaced(self, kept: Rows) -> AlteredLot:
        """The lot with kept records in the place of all others: the one before, so that what is sorted stays sorted."""
        stays = np.isin(self.record_of, kept)
        before = np.maximum.accumulate(np.where(stays, self.everything, -1))
        before[before < 0] = np.flatnonzero(stays)[0]
        contents = self.everything.copy()
        for name in np.setdiff1d(self.record_of, kept):
            gone = np.flatnonzero(self.record_of == name)
            one = np.flatnonzero(self.record_of == self.record_of[before[gone[0]]])
            contents[gone] = one[np.arange(len(gone)) % len(one)]
        return self._lot(contents, self.everything)

    def extreme(self, lot: AlteredLot, name: int) -> AlteredLot:
        """A lot of the same places, with a record a million times as large."""
        return self._changed(lot, name, lambda x: torch.where((x == 0).all(), _EXTREME, x * _EXTREME).to(x.dtype))

    def without_numbers(self, name: int, exchanged: bool) -> AlteredLot:
        """The lot with a record of NaN, whose whole numbers may be another record's."""
        other = int(np.flatnonzero(self.record_of != name)[0]) if exchanged else None
        return self._changed(self.whole(), name, lambda x: torch.full_like(x, math.nan), other)

    def has_floats(self) -> bool:
        """Whether there is anything that can be NaN."""
        return any(_is_float(x) and x.dim() and len(x) == self._rows for x in self._tensors())

    def longest(self) -> Rows:
        """Records that hold the largest of whole numbers that each row has one of, such as the lengths of texts."""
        columns = [x for x in self._tensors() if x.shape == (self._rows,) and not x.is_floating_point()]
        own = torch.from_numpy(self._chosen)
        return np.unique([self.record_of[int(x.cpu()[own].int().argmax())] for x in columns if not x.is_complex()])

    def _tensors(self) -> list[Tensor]:
        return [x for x in tree_leaves(self._batch) if isinstance(x, Tensor)]

    def _lot(self, contents: Rows, places: Rows | None = None) -> AlteredLot:
        places = contents if places is None else places
        batch = select(self._batch, self._rows, self._chosen[contents])
        if self._numbers:
            batch = self._renumbered(batch, self.record_of[places])
        return AlteredLot(batch, places)

    def _numbering(self, index: str) -> frozenset[int]:
        """Which of the batch's tensors say the record of each row; in a part of the lot labels may do so by chance."""
        if index and isinstance(self._batch, Mapping):
            named = self._batch[index]
            return frozenset(place for place, x in enumerate(self._tensors()) if x is named)
        before, own = torch.from_numpy(self.record_of), torch.from_numpy(self._chosen)
        return frozenset(
            place
            for place, x in enumerate(self._tensors())
            if x.shape == (self._rows,) and not x.is_floating_point() and torch.equal(x.cpu()[own].long(), before)
        )

    def _renumbered(self, batch: Any, names: Rows) -> Any:
        """The batch with its entry of each row's record counted from 0 again, in the order of the rows."""
        first, inverse = np.unique(names, return_index=True, return_inverse=True)[1:]
        now = torch.from_numpy(first.argsort().argsort()[inverse])
        return self._mapped(batch, lambda x, is_number: now.to(x) if is_number else x)

    def _mapped(self, batch: Any, change: Callable[[Tensor, bool], Tensor]) -> Any:
        """The batch with each tensor x in the place of `change`(x, whether it says the record of each row)."""
        places = itertools.count()
        return tree_map(lambda x: change(x, next(places) in self._numbers) if isinstance(x, Tensor) else x, batch)

    def _changed(
        self, lot: AlteredLot, name: int, change: Callable[[Tensor], Tensor], other: int | None = None
    ) -> AlteredLot:
        """A lot in which the floating-point numbers of a record are changed, and whole ones taken from another row."""
        rows = torch.from_numpy(np.flatnonzero(self.record_of[lot.places] == name))

        def changed(x: Tensor, is_number: bool) -> Tensor:
            if not x.dim() or len(x) != len(lot.places):
                return x
            places = rows.to(x.device)
            if _is_float(x):
                return x.index_copy(0, places, change(x[places]))
            if other is None or is_number:
                return x
            return x.index_copy(0, places, x[other].expand(len(rows), *x.shape[1:]))

        return AlteredLot(self._mapped(lot.batch, changed), lot.places)


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
