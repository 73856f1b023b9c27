"""Finds items of a data set that another item stands in for, by what the data set does while one of them is fetched.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from dpbench.data.collation import random_numbers_kept
from dpbench.data.octaves import is_checked
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError

_GETTERS = ("__getitem__", "__getitems__")
_LIBRARIES = ("torch", "dpbench", "datasets", "builtins", "numpy", "scipy", "collections", "typing", "abc", "pandas")
_DEPTH = 4  # data sets inside of data sets
_MOST_PARTS = 100  # of a list that may hold data sets
_NO_FAILURES = (StopIteration, GeneratorExit)
_SUSPECTS = 8  # items that are looked into; of later ones, one of each octave
_CANDIDATES = 24  # positions that such an item is compared with
# A function that read the position of so many items, in such a share of them, reads that of each.
_HABIT_ITEMS = 10
_HABIT_SHARE = 0.9
_REMEDY = (
    "the record that stands in has several rows in a batch, each clipped separately, and epsilon does not hold for "
    "it. Remove the items that cannot be read from the data set (torch.utils.data.Subset), or return an empty record "
    "for them, such as zeros."
)

Getters = frozenset[CodeType]
"""Code of `__getitem__` and `__getitems__` of a data set and those inside of it."""


def watched(dataset: Any) -> Any:
    """A data set that is looked at while it is read, where it has code of its own that could turn to other items."""
    return WatchedDataset(dataset) if getters_of(dataset) else dataset


class WatchedDataset(Dataset[Any]):
    """A data set whose loader looks on while its items are read; for everybody else it is the data set itself.

    Each item is watched when this process reads it first, and the items of one lot of each octave.

    Args:
        dataset: Map-style.
    """

    def __init__(self, dataset: Any) -> None:
        # Past `__setattr__`, which sets attributes of the data set.
        self.__dict__["_dataset"] = dataset
        self.__dict__["_watch"] = _Watch(dataset)

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
        return self.__dict__["_watch"].read(self.__dict__["_dataset"], positions)


# ------------------------------------------------------------------------------------------------- what is noted


@dataclass
class Call:
    """A call of the data set's own code.

    Attributes:
        code: Which function it is.
        owner: Its first argument: the data set, of methods.
        position: Its second argument, if that is a whole number.
        raised: Whether an exception passed through it.
        empty: Whether it returned None.
    """

    code: CodeType
    owner: Any
    position: int | None
    raised: bool = False
    empty: bool = False


@dataclass
class Reading:
    """What a data set did to return one item, or several at once.

    Attributes:
        dataset: Whose code was called first.
        positions: That it was asked for.
        several: Whether it was asked by `__getitems__`.
        calls: Of its own code, in their order.
        numbers: Whole numbers that stood in variables of these.
        elsewhere: A position to which it turned though it was not asked for it.
        read: Positions that it asked itself for, of several.
    """

    dataset: Any
    positions: tuple[int, ...]
    several: bool
    calls: list[Call] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    elsewhere: int | None = None
    read: list[int] = field(default_factory=list)

    def finish(self) -> None:
        """Look whether, of several items that it read one by one, one was read twice and another one never."""
        counts = Counter(self.read)
        repeated = [place for place, count in counts.items() if count > 1]
        if repeated and any(position % len(self.dataset) not in counts for position in self.positions):
            self.elsewhere = repeated[0]

    @property
    def failed(self) -> bool:
        """Whether something failed, though an item was returned: it raised, or gave None and was called again."""
        later: set[CodeType] = set()
        for call in reversed(self.calls):
            if call.raised or (call.empty and call.code in later):
                return True
            later.add(call.code)
        return False

    def inside(self) -> dict[int, set[int]]:
        """Positions that were read of data sets inside of this one, by the identity of these."""
        places: dict[int, set[int]] = {}
        for call in self.calls:
            if call.code.co_name in _GETTERS and call.owner is not self.dataset and call.position is not None:
                places.setdefault(id(call.owner), set()).add(call.position)
        return places


class Trace:
    """Python's hook at calls of functions: notes what own code of data sets does.

    Args:
        getters: Code by which items are returned.
    """

    def __init__(self, getters: Getters) -> None:
        self.readings: list[Reading] = []
        self._getters = getters
        self._files = {code.co_filename for code in getters}
        self._active: list[Call] = []
        self._reading: Reading | None = None

    def read(self, fetch: Callable[[], Any]) -> Any:
        """Call a function that reads items, and note what happens."""
        sys.settrace(self)
        try:
            return fetch()
        finally:
            sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        """Begin to look on, if the function is own code."""
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        frame.f_trace_lines = False
        second = _argument(frame, 1)
        position = int(second) if isinstance(second, int | np.integer) else None
        call = Call(code, _argument(frame, 0), position)
        if code in self._getters:
            self._note(call, second)
        if self._reading is None:
            return None
        self._active.append(call)
        self._reading.calls.append(call)

        def trace(frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
            if event == "exception":
                call.raised |= not issubclass(value[0], _NO_FAILURES)
            elif event == "return":
                self._end(call, frame, value)
            return trace

        return trace

    def _note(self, call: Call, argument: Any) -> None:
        """Begin a reading, or see where one that is under way turns to."""
        if self._reading is None:
            positions = argument if isinstance(argument, list | tuple | np.ndarray) else [argument]
            if not all(isinstance(position, int | np.integer) for position in positions):
                return
            several = call.code.co_name == "__getitems__"
            self._reading = Reading(call.owner, tuple(map(int, positions)), several)
            self.readings.append(self._reading)
            return
        if call.position is None:
            return
        size = len(call.owner)
        place = call.position % size
        if self._reading.several and call.owner is self._reading.dataset:
            self._reading.read.append(place)
            expected = {position % size for position in self._reading.positions}
        else:
            # A getter of the same data set that runs already: only if it calls itself may it turn elsewhere.
            outer = [other for other in self._active if other.code is call.code and other.owner is call.owner]
            if not outer:
                return
            expected = {other.position % size for other in outer if other.position is not None}
        if place not in expected:
            self._reading.elsewhere = place

    def _end(self, call: Call, frame: FrameType, value: Any) -> None:
        call.empty = value is None
        self._active = [other for other in self._active if other is not call]
        if self._reading is None:
            return
        for variable in frame.f_locals.values():
            if isinstance(variable, int | np.integer):
                self._reading.numbers.add(int(variable))
        if not self._active:
            self._reading.finish()
            self._reading = None


def _argument(frame: FrameType, number: int) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[number]) if code.co_argcount > number else None


def getters_of(dataset: Any) -> Getters:
    """Code by which a data set, and those inside of it, return items; that of libraries is left out."""
    getters: set[CodeType] = set()
    for part in _parts(dataset, _DEPTH):
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] in _LIBRARIES:
                continue
            for name in _GETTERS:
                function: Any = vars(kind).get(name)
                while hasattr(function, "__wrapped__"):
                    function = function.__wrapped__
                if isinstance(function, FunctionType):
                    getters.add(function.__code__)
    return frozenset(getters)


def _parts(dataset: Any, depth: int) -> Iterator[Any]:
    """A data set, and those that its attributes hold."""
    yield dataset
    if not depth:
        return
    for value in list(getattr(dataset, "__dict__", {}).values()):
        is_short_list = isinstance(value, list | tuple) and len(value) < _MOST_PARTS
        for inner in value if is_short_list else [value]:
            if isinstance(inner, Dataset) or (_has_items(type(inner)) and not isinstance(inner, Tensor)):
                yield from _parts(inner, depth - 1)


def _has_items(kind: type) -> bool:
    return all(isinstance(getattr(kind, name, None), FunctionType) for name in ("__getitem__", "__len__"))


# ------------------------------------------------------------------------------------------------- what is refused


class _Watch:
    """Decides which items of a data set are looked at, and refuses those that others stand in for."""

    def __init__(self, dataset: Any) -> None:
        self._getters = getters_of(dataset)
        self._seen = np.zeros(len(dataset), dtype=bool)
        self._habits = _Habits()
        self._lots = 0
        self._suspects = 0

    def read(self, dataset: Any, positions: Sequence[int]) -> Any:
        """Read the items of a lot."""
        self._lots += 1
        places = list(positions)
        is_due = is_checked(self._lots) or not self._seen[places].all()
        if not is_due or sys.gettrace() is not None:  # a debugger's
            return _read(dataset, positions)
        trace = Trace(self._getters)
        items = trace.read(lambda: _read(dataset, positions))
        self._seen[places] = self._habits.are_known  # else they are watched once more
        for reading in trace.readings:
            self._check(reading)
        return items

    def _check(self, reading: Reading) -> None:
        """Refuse an item that is another one, or is made of others at random."""
        if reading.elsewhere is not None:
            raise _standing_in(reading.dataset, reading.positions, reading.elsewhere)
        turned_to = self._habits.turned_to(reading)
        failed = reading.failed
        mixes = any(len(places) > 1 for places in reading.inside().values())
        if not (failed or mixes or turned_to):
            return
        self._suspects += 1
        if self._suspects > _SUSPECTS and not is_checked(self._suspects):
            return
        for position in reading.positions:
            if failed or turned_to:
                self._refuse_stand_in(reading, position, turned_to)
            else:
                self._refuse_random_parts(reading, position)

    def _refuse_stand_in(self, reading: Reading, position: int, turned_to: Sequence[int]) -> None:
        """Compare an item, read by a failure or another position, with those that may stand in for it."""
        try:
            item, again = self._read_alone(reading, position)
        except Exception as error:
            if reading.several:  # by itself there is none, and in the lot there was
                raise _standing_in(reading.dataset, (position,), None) from error
            return  # it fails now and then
        if again.elsewhere is not None:
            raise _standing_in(reading.dataset, (position,), again.elsewhere)
        if not again.failed and not turned_to:
            return  # of several, it was another one
        for place in _candidates(again, position, turned_to):
            try:
                candidate, how = self._read_alone(reading, place)
            except Exception:  # is none
                continue
            if not how.failed and _is_same_content(item, candidate):
                raise _standing_in(reading.dataset, (position,), place)

    def _refuse_random_parts(self, reading: Reading, position: int) -> None:
        """Refuse an item that is made of several of an inner data set, of other ones at each reading (mixup)."""
        try:
            _, first = self._read_alone(reading, position, seed=1)
            _, second = self._read_alone(reading, position, seed=2)
        except Exception:  # the lot itself says what is wrong
            return
        if first.inside() != second.inside():
            raise ConfigurationError(
                f"item {position} of {type(reading.dataset).__name__} is made of several items of a data set inside of "
                "it, of others each time it is read (mixup, random pairs): then clipping does not bound what one "
                "record does. Make each item of one record."
            )

    def _read_alone(self, reading: Reading, position: int, seed: int = 0) -> tuple[Any, Reading]:
        """One item with random numbers of a seed, and how it came about.

        Raises:
            Exception: Whatever the data set raises; LookupError where it does not return one item.
        """
        trace = Trace(self._getters)
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


class _Habits:
    """Which functions of a data set read the position of the item that is asked for, in almost all items."""

    def __init__(self) -> None:
        self._items = 0
        self._counts: Counter[tuple[CodeType, int]] = Counter()

    @property
    def are_known(self) -> bool:
        """Whether enough items were read."""
        return self._items >= _HABIT_ITEMS

    def turned_to(self, reading: Reading) -> list[int]:
        """Positions that such a function read in the place of the item's own.

        Args:
            reading: Of an item; it is taken note of.
        """
        if reading.several:
            self._items += len(reading.positions)
            return []
        size = len(reading.dataset)
        places: dict[tuple[CodeType, int], set[int]] = {}
        for call in reading.calls[1:]:
            if call.position is not None:
                place = call.position + size if call.position < 0 else call.position
                places.setdefault((call.code, id(call.owner)), set()).add(place)
        self._items += 1
        turned_to: set[int] = set()
        for function, read in places.items():
            if reading.positions[0] % size in read:
                self._counts[function] += 1
            elif self.are_known and self._counts[function] >= _HABIT_SHARE * self._items:
                turned_to |= read
        return sorted(turned_to)


def _read(dataset: Any, positions: Sequence[int]) -> Any:
    """Items as torch's loaders fetch them."""
    several = getattr(dataset, "__getitems__", None)
    return several(positions) if several else [dataset[position] for position in positions]


def _candidates(reading: Reading, position: int, turned_to: Sequence[int]) -> list[int]:
    """Positions that data sets take in the place of one that cannot be read: named, first, last, next ones."""
    size = len(reading.dataset)
    neighbors = (0, size - 1, position - 1, position + 1, position - 2, position + 2)
    places: dict[int, None] = {}  # each once, in this order
    for place in (*turned_to, *sorted(reading.numbers), *neighbors):
        if -size <= place < size and place % size != position % size:
            places[place % size] = None
    return list(places)[:_CANDIDATES]


def _standing_in(dataset: Any, positions: Sequence[int], place: int | None) -> ConfigurationError:
    """The error of an item that is there in the place of another one."""
    name = type(dataset).__name__
    items = ", ".join(map(str, positions[:3])) + (", ..." if len(positions) > 3 else "")
    stand_in = "another item" if place is None else f"item {place}"
    return ConfigurationError(f"{name} returns {stand_in} in the place of item {items}: {_REMEDY}")


def _is_same_content(item: Any, other: Any) -> bool:
    """Whether the largest part of two items is the same and no constant (as an empty record is)."""
    a = _content(item)
    b = _content(other)
    if a.shape != b.shape or a.dtype != b.dtype or len(np.unique(a.astype(str))) < 2:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))


def _content(item: Any) -> NDArray[Any]:
    """The largest part of an item, flat; all of its numbers, where these are single ones."""
    know_as_tree(item)
    arrays = [_flat(leaf) for leaf in tree_leaves(item)]
    largest = max(arrays, key=len, default=np.zeros(0))
    if len(largest) > 1 or not arrays:
        return largest
    return np.concatenate([array.astype(str) for array in arrays])


def _flat(leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, Tensor):
        numbers = leaf.detach().cpu().flatten()
        return (numbers.float() if numbers.is_floating_point() else numbers).numpy()
    if isinstance(leaf, str | bytes):
        return np.array(list(leaf))
    try:
        return np.asarray(leaf).ravel()
    except (TypeError, ValueError):
        return np.array([repr(leaf)])
