"""Counts which items a data set reads to return one, and refuses an item that is made of several.

A record that stands in for others has several rows in a batch, each clipped by itself, and moves the sum by more than
the bound; so does one that is mixed into others. Both show where a data set asks itself, or a data set inside of it,
for other items: `except OSError: return self[0]`, or mixup with a random partner. Each getter of each data set may be
asked for one index per item, which is counted in each batch.

By definition a record is what `dataset[position]` returns. Reads of a data set's own files, arrays and lists, or in
threads of its own, are not seen, nor how a `__getitems__` of its own divides its reads among its items.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.errors import ConfigurationError

_GETTERS = ("__getitem__", "__getitems__")
_LIBRARIES = ("torch.", "torchvision.", "dpbench.", "datasets.arrow_dataset.", "builtins.", "typing.")


class _Patching:
    """The lock that is held while getters are counted: two threads would put each other's back."""

    lock = threading.RLock()

    @classmethod
    def renew(cls) -> None:
        """Take a new lock in a worker that was forked while another thread, which is not there, held it."""
        cls.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Patching.renew)


def watched(dataset: Any) -> Any:
    """Have a data set's reads counted, if it has code of its own that could read other items."""
    kinds = [kind for kind, _, _ in _getters_of(_parts(dataset))]
    is_known = all(f"{kind.__module__}.".startswith(_LIBRARIES) for kind in kinds)
    return dataset if is_known else WatchedDataset(dataset)


class WatchedDataset(Dataset[Any]):
    """A data set with reads that are counted while a loader fetches a batch; otherwise it behaves as the original.

    Args:
        dataset: Map-style data set.
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

    def __reduce__(self) -> tuple[Any, ...]:
        return WatchedDataset, (self.__dict__["_dataset"],)

    def __len__(self) -> int:
        return len(self.__dict__["_dataset"])

    def __getitem__(self, position: Any) -> Any:
        return self.__dict__["_dataset"][position]

    def __getitems__(self, positions: Sequence[int]) -> Any:
        """The items of a batch, as the data set returns them.

        Raises:
            ConfigurationError: One of them is made of several items, or is another one.
        """
        dataset = self.__dict__["_dataset"]
        reads = _Reads(dataset)
        together = getattr(dataset, "__getitems__", None)
        with reads.counted() as only_torch_batches:
            if together is not None and not (only_torch_batches and _is_of_torch(together)):
                return reads.of_items(positions, lambda: together(positions))
            return [reads.of_items([position], lambda: dataset[position]) for position in positions]  # noqa: B023


class _Reads:
    """The indices for which getters of a data set, and of those inside of it, are asked by the thread that reads.

    Args:
        dataset: The data set.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._indices: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._parts = {id(part): part for part in _parts(dataset)}
        self._getter = inspect.getattr_static(type(dataset), "__getitem__", None)
        self._thread = threading.get_ident()

    @contextmanager
    def counted(self) -> Iterator[bool]:
        """Within, getters note the indices asked for; yields whether only torch's code reads several items at once."""
        with _Patching.lock, ExitStack() as stack:
            getters = _getters_of(self._parts.values())
            for kind, name, getter in getters:
                with suppress(TypeError):  # of a class that nobody can change
                    setattr(kind, name, self._noting(getter))
                    stack.callback(setattr, kind, name, getter)
            yield all(_is_of_torch(getter) for _, name, getter in getters if name == "__getitems__")

    def of_items(self, positions: Sequence[int], read: Callable[[], Any]) -> Any:
        """Read items at some positions.

        Raises:
            ConfigurationError: More indices were asked for than there are items, or others.
        """
        self._indices.clear()
        items = read()
        size = len(self._dataset)
        expected = {int(position) % size for position in positions}
        for (owner, getter), indices in self._indices.items():
            is_other = owner == id(self._dataset) and getter == id(self._getter) and indices != expected
            if is_other or len(indices) > len(expected):
                name = type(self._dataset).__name__
                place = min(expected - indices, default=min(expected))
                read_instead = ", ".join(map(str, sorted(indices - {place})[:3]))
                raise ConfigurationError(
                    f"{name} reads items of {type(self._parts[owner]).__name__} at other indices ({read_instead}) for "
                    f"item {place}: a record that replaces others or is mixed into them changes a batch by more than "
                    "the clipping bound. Do not mix items. Remove those that cannot be read (torch.utils.data.Subset), "
                    "or return an empty record, such as zeros. Read parts that items share (windows) from a list or a "
                    "tensor; fill caches before the training."
                )
        return items

    def _noting(self, getter: Any) -> Any:
        @functools.wraps(getter)
        def noted(owner: Any, *arguments: Any, **options: Any) -> Any:
            if id(owner) in self._parts and threading.get_ident() == self._thread:
                for index in (*arguments, *options.values())[:1]:
                    self._indices[id(owner), id(getter)].update(_numbers(index, owner))
            return getter.__get__(owner, type(owner))(*arguments, **options)

        return noted


def _is_of_torch(getter: Any) -> bool:
    return str(getattr(getter, "__module__", "")).startswith("torch.")


def _numbers(index: Any, owner: Any) -> list[int]:
    """Indices of items that a getter is asked for; none, where it is asked for something else, such as a column."""
    try:
        size = len(owner)
    except Exception:  # of an inner data set, which need not have a length
        size = 0
    if isinstance(index, slice):
        index = list(range(*index.indices(size)))
    values = index.tolist() if isinstance(index, Tensor | np.ndarray) else index
    values = list(values) if isinstance(values, list | range) else [values]
    if any(isinstance(value, bool) or not isinstance(value, int | np.integer) for value in values):
        return []
    return [int(value) % size if size else int(value) for value in values]


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
            entries = list(value.values()) if isinstance(value, dict) else value
            if isinstance(entries, list | tuple):
                # Lists of other things may be long.
                if entries and isinstance(entries[0], Dataset):
                    pending += entries
            elif isinstance(entries, Dataset):
                pending.append(entries)
    return list(parts.values())
