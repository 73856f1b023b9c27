"""Finds items of a data set that another item stands in for, by what the data set reads while one of them is fetched.

A record that stands in for others has several rows in a lot, each clipped by itself, and moves the sum by more than the
bound. Equal contents prove nothing: two people may have equal records. What the data set does while it is asked for an
item does: it turns to another of its own positions, or it swallows a failure and returns what another position holds.

By definition a record is what `dataset[position]` returns. What a data set makes of its own files and tensors without
such a trace (one file under many positions, say) is not seen.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from dpbench.data.mixing import random_numbers_kept
from dpbench.data.octaves import is_checked
from dpbench.data.readings import Reading, Trace, getters_of
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError

_SUSPECTS = 8  # items that are looked into; of later ones, one of each octave
_CANDIDATES = 24  # positions that such an item is compared with
_HABIT = 10, 0.9  # a function that read the position of so many items, in such a share, reads that of each
_REMEDY = (
    "the record that stands in has several rows in a lot, each clipped by itself, and epsilon does not hold for it. "
    "Leave the items that cannot be read out of the data set (torch.utils.data.Subset), or return an empty record for "
    "them, such as zeros."
)


class WatchedDataset(Dataset[Any]):
    """A data set whose loader looks on while its items are read; for everybody else it is the data set itself.

    Each item is watched when this process reads it first, and the items of one lot of each octave.

    Args:
        dataset: Map-style.
    """

    def __init__(self, dataset: Any) -> None:
        own = self.__dict__
        own["_dataset"] = dataset
        own["_getters"] = getters_of(dataset)
        own["_seen"] = np.zeros(len(dataset), dtype=bool)
        own["_lots"] = 0
        own["_suspects"] = 0
        own["_habits"] = Habits()

    @property  # type: ignore[misc]  # what isinstance asks
    def __class__(self) -> Any:
        return type(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_dataset"], name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchedDataset, (self.__dict__["_dataset"],)

    def __len__(self) -> int:
        return len(self.__dict__["_dataset"])

    def __getitem__(self, position: Any) -> Any:
        return self.__dict__["_dataset"][position]

    def __getitems__(self, positions: Sequence[int]) -> Any:
        """The items of a lot, as the data set returns them.

        Raises:
            ConfigurationError: One of them is another item of the data set.
        """
        own = self.__dict__
        dataset: Any = own["_dataset"]
        own["_lots"] += 1
        watched = is_checked(own["_lots"]) or not own["_seen"][list(positions)].all()
        if not watched or sys.gettrace() is not None:  # a debugger's
            return _read(dataset, positions)
        trace = Trace(own["_getters"])
        items = trace.read(lambda: _read(dataset, positions))
        own["_seen"][list(positions)] = own["_habits"].known  # else they are watched once more
        for reading in trace.readings:
            self._check(reading)
        return items

    def _check(self, reading: Reading) -> None:
        """Refuse an item that is another one, or is made of others at random."""
        own = self.__dict__
        if reading.elsewhere is not None:
            _refuse(reading.dataset, reading.positions, reading.elsewhere)
        mixes = any(len(places) > 1 for places in reading.inside().values())
        turned = own["_habits"].turned_to(reading)
        if not (reading.failed or mixes or turned):
            return
        own["_suspects"] += 1
        if own["_suspects"] > _SUSPECTS and not is_checked(own["_suspects"]):
            return
        for position in reading.positions:
            if reading.failed or turned:
                _refuse_stand_in(reading, position, own["_getters"], turned)
            else:
                _refuse_random_parts(reading, position, own["_getters"])


class Habits:
    """Which functions of a data set read the position of the item that is asked for, in almost all items."""

    def __init__(self) -> None:
        self._items = 0
        self._own: Counter[tuple[CodeType, int]] = Counter()

    @property
    def known(self) -> bool:
        """Whether enough items were read."""
        return self._items >= _HABIT[0]

    def turned_to(self, reading: Reading) -> list[int]:
        """Positions that such a function read in the place of the item's own.

        Args:
            reading: Of an item; it is taken note of.
        """
        if reading.several:
            self._items += len(reading.positions)
            return []
        size = len(reading.dataset)
        asked = reading.positions[0] % size
        read: dict[tuple[CodeType, int], set[int]] = {}
        for call in reading.calls[1:]:
            if call.position is not None:
                place = call.position + size if call.position < 0 else call.position
                read.setdefault((call.code, id(call.owner)), set()).add(place)
        self._items += 1
        self._own.update(key for key, places in read.items() if asked in places)
        strange = [key for key, places in read.items() if asked not in places]
        often = [key for key in strange if self.known and self._own[key] >= _HABIT[1] * self._items]
        return sorted({place for key in often for place in read[key]})


def watched(dataset: Any) -> Any:
    """A data set that is looked at while it is read, where it has code of its own that could turn to other items."""
    return WatchedDataset(dataset) if getters_of(dataset) else dataset


def _read(dataset: Any, positions: Sequence[int]) -> Any:
    """Items as torch's loaders fetch them."""
    several = getattr(dataset, "__getitems__", None)
    return several(positions) if several else [dataset[position] for position in positions]


def _read_alone(
    reading: Reading,
    position: int,
    getters: frozenset[CodeType],
    seed: int = 0,
) -> tuple[Any, Reading]:
    """One item with random numbers of a seed, and how it came about.

    Raises:
        Exception: Whatever the data set raises; LookupError where it does not return one item.
    """
    trace = Trace(getters)
    dataset = reading.dataset
    with random_numbers_kept():
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        if reading.several:
            items = trace.read(lambda: dataset.__getitems__([position]))
        else:
            items = [trace.read(lambda: dataset[position])]
    if len(items) != 1:
        raise LookupError
    return items[0], trace.readings[0]


def _refuse_stand_in(
    reading: Reading,
    position: int,
    getters: frozenset[CodeType],
    turned: Sequence[int],
) -> None:
    """Compare an item with those that may stand in for it, where reading it failed or turned to another position."""
    try:
        item, again = _read_alone(reading, position, getters)
    except Exception:
        if reading.several:  # by itself there is none, and in the lot there was
            _refuse(reading.dataset, (position,), None)
        return  # it fails now and then
    if again.elsewhere is not None:
        _refuse(reading.dataset, (position,), again.elsewhere)
    if not again.failed and not turned:
        return  # of several, it was another one
    for other in _candidates(again, position, turned):
        try:
            candidate, how = _read_alone(reading, other, getters)
        except Exception:  # is none
            continue
        if not how.failed and _same_content(item, candidate):
            _refuse(reading.dataset, (position,), other)


def _candidates(reading: Reading, position: int, turned: Sequence[int]) -> list[int]:
    """Positions that data sets take in the place of one that cannot be read: named, first, last, next ones."""
    size = len(reading.dataset)
    named = sorted(reading.numbers)
    places = [*turned, *named, 0, size - 1, position - 1, position + 1, position - 2, position + 2]
    inside = dict.fromkeys(place % size for place in places if -size <= place < size)
    return [place for place in inside if place != position % size][:_CANDIDATES]


def _refuse_random_parts(
    reading: Reading,
    position: int,
    getters: frozenset[CodeType],
) -> None:
    """Refuse an item that is made of several of an inner data set, of other ones at each reading (mixup)."""
    try:
        first, second = (_read_alone(reading, position, getters, seed)[1].inside() for seed in (1, 2))
    except Exception:  # the lot itself says what is wrong
        return
    if first != second:
        name = type(reading.dataset).__name__
        raise ConfigurationError(
            f"item {position} of {name} is made of several items of a data set inside of it, of others each time it is "
            "read (mixup, random pairs): then clipping does not bound what one record does. Make each item of one "
            "record."
        )


def _refuse(dataset: Any, positions: Sequence[int], other: int | None) -> None:
    """Raise ConfigurationError: one item is there in the place of another one."""
    name = type(dataset).__name__
    asked = ", ".join(map(str, positions[:3])) + (", ..." if len(positions) > 3 else "")
    which = "another item" if other is None else f"item {other}"
    raise ConfigurationError(f"{name} returns {which} in the place of item {asked}: {_REMEDY}")


def _same_content(one: Any, other: Any) -> bool:
    """Whether the largest part of two items is the same and no constant (as an empty record is)."""
    mine = _content(one)
    theirs = _content(other)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype or len(np.unique(mine.astype(str))) < 2:
        return False
    return bool(np.array_equal(mine, theirs, equal_nan=mine.dtype.kind in "fc"))


def _content(item: Any) -> NDArray[Any]:
    """The largest part of an item, flat; all of its numbers, where these are single ones."""
    know_as_tree(item)
    arrays = [_flat(leaf) for leaf in tree_leaves(item)]
    largest = max(arrays, key=len, default=np.zeros(0))
    return largest if len(largest) > 1 else np.concatenate([one.astype(str) for one in arrays or [largest]])


def _flat(leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, Tensor):
        return (
            leaf.detach().cpu().flatten().float().numpy() if leaf.is_floating_point() else leaf.cpu().flatten().numpy()
        )
    if isinstance(leaf, str | bytes):
        return np.array(list(leaf))
    try:
        return np.asarray(leaf).ravel()
    except (TypeError, ValueError):
        return np.array([repr(leaf)])
