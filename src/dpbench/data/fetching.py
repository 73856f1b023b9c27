"""Counts which items a data set reads to return one, and refuses an item that is made of several.

A record that stands in for others has several rows in a lot, each clipped by itself, and moves the sum by more than the
bound; so does one that is mixed into others. Both show where a data set asks itself, or a data set inside of it, for
other items: `except OSError: return self[0]`, or mixup with a random partner. Each getter of each data set may be asked
for one index for an item, which is counted in each batch.

By definition a record is what `dataset[position]` returns. What a data set makes of its own files, arrays and lists, or
reads in threads of its own, is not seen, nor how `__getitems__` of its own parts what it reads among its items.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.errors import ConfigurationError

_GETTERS = ("__getitem__", "__getitems__")
_LIBRARIES = ("torch.", "torchvision.", "dpbench.", "datasets.arrow_dataset.", "builtins.", "typing.")
_PATCHING = threading.RLock()
"""Held while getters are counted: two threads would put each other's back."""


def _renew_lock() -> None:
    """Take a new lock in a worker that was forked while another thread, which is not there, held it."""
    global _PATCHING  # noqa: PLW0603  it is the module's
    _PATCHING = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def watched(dataset: Any) -> Any:
    """A data set whose reads are counted, where it has code of its own that could turn to other items."""
    rooms = [f"{kind.__module__}." for kind, _, _ in _getters_of(_parts(dataset))]
    return dataset if all(room.startswith(_LIBRARIES) for room in rooms) else WatchedDataset(dataset)


class WatchedDataset(Dataset[Any]):
    """A data set whose reads are counted while a loader fetches a lot; for everybody else it is the data set itself.

    Args:
        dataset: Map-style.
    """

    def __init__(self, dataset: Any) -> None:
        # Past `__setattr__`, which sets attributes of the data set.
        self.__dict__["_dataset"] = dataset

    @property  # type: ignore[misc]  # what isinstance asks
    def __class__(self) -> Any:
        return type(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_dataset"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_dataset"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchedDataset, (self.__dict__["_dataset"],)

    def __len__(self) -> int:
        return len(self.__dict__["_dataset"])

    def __getitem__(self, position: Any) -> Any:
        return self.__dict__["_dataset"][position]

    def __getitems__(self, positions: Sequence[int]) -> Any:
        """The items of a lot, as the data set returns them.

        Raises:
            ConfigurationError: One of them is made of several items, or is another one.
        """
        dataset = self.__dict__["_dataset"]
        reads = _Reads(dataset)
        together = getattr(dataset, "__getitems__", None)
        with reads.counted():
            if together is None or (is_of_torch(together) and reads.reads_alone):
                return [reads.of_items([position], lambda: dataset[position]) for position in positions]  # noqa: B023
            return reads.of_items(positions, lambda: together(positions))


class _Reads:
    """The indices for which getters of a data set, and of those inside of it, are asked by the thread that reads.

    Args:
        dataset: Whose items are read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._indices: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self._parts = {id(part): part for part in _parts(dataset)}
        self._sizes = {number: _size_of(part) for number, part in self._parts.items()}
        self._getter = inspect.getattr_static(type(dataset), "__getitem__", None)
        self._thread = threading.get_ident()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within, getters of the data sets' classes, those of libraries too, note what they are asked for."""
        with _PATCHING, ExitStack() as stack:
            for kind, name, getter in _getters_of(self._parts.values()):
                with suppress(TypeError):  # of a class that nobody can change
                    setattr(kind, name, self._noting(getter))
                    stack.callback(setattr, kind, name, getter)
            yield

    @property
    def reads_alone(self) -> bool:
        """Whether items are read one by one: where no own code, but torch's alone, reads several at once."""
        several = [getter for _, name, getter in _getters_of(self._parts.values()) if name == "__getitems__"]
        return all(map(is_of_torch, several))

    def of_items(self, positions: Sequence[int], read: Callable[[], Any]) -> Any:
        """Read items at some positions.

        Raises:
            ConfigurationError: More indices were asked for than there are items, or others.
        """
        self._indices.clear()
        items = read()
        size = len(self._dataset)
        expected = {int(position) % size for position in positions}
        for (owner, getter), counts in self._indices.items():
            if owner == id(self._dataset) and getter == id(self._getter):
                self._refuse_others(expected, counts)
            if len(counts) > len(expected):
                raise ConfigurationError(
                    f"{type(self._dataset).__name__} reads several items of {type(self._parts[owner]).__name__} for "
                    f"item {min(expected)} (indices {', '.join(map(str, sorted(counts)[:3]))}): a record that is read "
                    "for others, in their place or mixed into them, moves a batch by more than clipping allows. Remove "
                    "items that cannot be read (torch.utils.data.Subset), or return an empty record for them, such as "
                    "zeros; mix nothing. Items that are made of the same pieces each time (windows) read them from a "
                    "list or a tensor; caches are filled before the training."
                )
        return items

    def _refuse_others(self, expected: set[int], counts: Counter[int]) -> None:
        """Refuse an item that was asked for in the place of another one."""
        stand_ins = [index for index in counts if index not in expected]
        if not stand_ins and expected - counts.keys():
            stand_ins = [index for index, count in counts.items() if count > 1]
        if stand_ins:
            missing = sorted(expected - counts.keys()) or sorted(expected)
            items = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
            raise ConfigurationError(
                f"{type(self._dataset).__name__} returns item {stand_ins[0]} in the place of item {items}: the record "
                "that stands in has several rows in a batch, each clipped separately, and epsilon does not hold for "
                "it. Remove the items that cannot be read from the data set (torch.utils.data.Subset), or return an "
                "empty record for them, such as zeros."
            )

    def _noting(self, getter: Any) -> Any:
        @functools.wraps(getter)
        def noted(owner: Any, *arguments: Any, **options: Any) -> Any:
            if id(owner) in self._parts and threading.get_ident() == self._thread:
                size = self._sizes[id(owner)]
                for index in (*arguments, *options.values())[:1]:
                    for number in _numbers(index, size):
                        self._indices[id(owner), id(getter)][number % size if size else number] += 1
            return getter.__get__(owner, type(owner))(*arguments, **options)

        return noted


def is_of_torch(getter: Any) -> bool:
    """Whether a getter is code of torch."""
    return str(getattr(getter, "__module__", "")).startswith("torch.")


def _numbers(index: Any, size: int) -> Sequence[int]:
    """Indices of items that a getter is asked for; none, where it is asked for something else, such as a column."""
    if isinstance(index, slice):
        return range(*index.indices(size))
    values = index.tolist() if isinstance(index, Tensor | np.ndarray) else index
    values = values if isinstance(values, list | range) else [values]
    is_index = all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values)
    return [int(value) for value in values] if is_index else []


def _size_of(part: Any) -> int:
    """Number of items of a data set; 0 where it tells none."""
    try:
        return len(part)
    except Exception:  # of an inner data set, which need not have a length
        return 0


def _getters_of(parts: Iterable[Any]) -> list[tuple[type, str, Any]]:
    """Getters of the classes of data sets: class, name and function."""
    getters = []
    for kind in dict.fromkeys(kind for part in parts for kind in type(part).__mro__):
        for name in _GETTERS:
            getter = vars(kind).get(name)
            if callable(getter) and hasattr(getter, "__get__"):
                getters.append((kind, name, getter))
    return getters


def _parts(dataset: Any) -> list[Any]:
    """A data set, and those that its attributes hold, in lists and dictionaries too."""
    parts: dict[int, Any] = {}
    pending = [dataset]
    while pending:
        part = pending.pop()
        if id(part) in parts:
            continue
        parts[id(part)] = part
        for value in list(getattr(part, "__dict__", {}).values()):
            held: Iterable[Any] = [value]
            if isinstance(value, list | tuple):
                held = value
            elif isinstance(value, dict):
                held = value.values()
            pending += takewhile(_is_dataset, held)  # lists of other things may be long
    return list(parts.values())


def _is_dataset(value: Any) -> bool:
    return isinstance(value, Dataset)
