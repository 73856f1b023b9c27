"""What a data set does while it is asked for an item: which of its own code runs, at what positions, and what fails."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

_GETTERS = ("__getitem__", "__getitems__")
_LIBRARIES = ("torch", "dpbench", "datasets", "builtins", "numpy", "collections", "typing", "abc", "pandas")
_DEEP = 4  # data sets inside of data sets
_ENDS = (StopIteration, GeneratorExit)  # are no failures


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
        calls: Of own code, in their order.
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

    def compare(self) -> None:
        """At the end: of several items that it read one by one, was one read twice and another one never?"""
        counts = Counter(self.read)
        twice = [place for place, times in counts.items() if times > 1]
        if twice and any(position % len(self.dataset) not in counts for position in self.positions):
            self.elsewhere = twice[0]

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
        found: dict[int, set[int]] = {}
        for call in self.calls:
            if call.code.co_name in _GETTERS and call.owner is not self.dataset and call.position is not None:
                found.setdefault(id(call.owner), set()).add(call.position)
        return found


class Trace:
    """Python's hook at calls of functions: notes what own code of data sets does.

    Args:
        getters: Code of `__getitem__` and `__getitems__`.
    """

    def __init__(self, getters: frozenset[CodeType]) -> None:
        self._getters = getters
        self._files = {code.co_filename for code in getters}
        self._active: list[Call] = []
        self._reading: Reading | None = None
        self.readings: list[Reading] = []

    def read(self, fetch: Callable[[], Any]) -> Any:
        """What a function returns that reads items."""
        sys.settrace(self)
        try:
            return fetch()
        finally:
            sys.settrace(None)

    def __call__(
        self,
        frame: FrameType,
        event: str,
        _: Any,
    ) -> Callable[..., Any] | None:
        """Begin to look on, if the function is own code."""
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        frame.f_trace_lines = False
        call = _call_of(frame)
        if code in self._getters:
            self._note(call, frame)
        if self._reading is None:
            return None
        self._active.append(call)
        self._reading.calls.append(call)

        def local(frame: FrameType, event: str, value: Any) -> Callable[..., Any]:
            if event == "exception":
                call.raised |= not issubclass(value[0], _ENDS)
            elif event == "return":
                self._end(call, frame, value)
            return local

        return local

    def _note(self, call: Call, frame: FrameType) -> None:
        """Begin a reading, or see where one that is under way turns to."""
        if self._reading is None:
            asked = _positions(_argument(frame, 1))
            if asked is None:
                return
            self._reading = Reading(call.owner, asked, call.code.co_name == "__getitems__")
            self.readings.append(self._reading)
            return
        reading = self._reading
        again = any(other.code is call.code and other.owner is call.owner for other in self._active)
        several = reading.several and call.owner is reading.dataset
        if call.position is None or not (again or several):
            return
        size = len(call.owner)
        place = call.position % size
        if several:
            asked_for = {one % size for one in reading.positions}
            reading.read.append(place)
        else:
            active = [one for one in self._active if one.code is call.code and one.owner is call.owner]
            asked_for = {one.position % size for one in active if one.position is not None}
        if place not in asked_for:
            reading.elsewhere = place

    def _end(
        self,
        call: Call,
        frame: FrameType,
        value: Any,
    ) -> None:
        call.empty = value is None
        if self._reading is not None:
            self._reading.numbers |= {int(x) for x in frame.f_locals.values() if isinstance(x, int | np.integer)}
        self._active = [other for other in self._active if other is not call]
        if not self._active and self._reading is not None:
            self._reading.compare()
            self._reading = None


def _argument(frame: FrameType, number: int) -> Any:
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[number]) if code.co_argcount > number else None


def _call_of(frame: FrameType) -> Call:
    second = _argument(frame, 1)
    position = int(second) if isinstance(second, int | np.integer) else None
    return Call(frame.f_code, _argument(frame, 0), position)


def _positions(asked: Any) -> tuple[int, ...] | None:
    """Positions of an argument of `__getitem__` or `__getitems__`; None where it holds something else."""
    several = asked if isinstance(asked, list | tuple | np.ndarray) else [asked]
    known = all(isinstance(one, int | np.integer) for one in several)
    return tuple(map(int, several)) if known else None


def getters_of(dataset: Any) -> frozenset[CodeType]:
    """Code by which a data set, and those inside of it, return items; that of libraries is left out."""
    functions = [
        vars(kind).get(name)
        for part in _parts(dataset, _DEEP)
        for kind in type(part).__mro__
        if kind.__module__.partition(".")[0] not in _LIBRARIES
        for name in _GETTERS
    ]
    return frozenset(function.__code__ for function in map(_unwrapped, functions) if isinstance(function, FunctionType))


def _parts(dataset: Any, depth: int) -> Iterator[Any]:
    """A data set, and those that its attributes hold."""
    yield dataset
    if depth:
        for value in list(getattr(dataset, "__dict__", {}).values()):
            for inner in value if isinstance(value, list | tuple) and len(value) < 100 else [value]:
                if isinstance(inner, Dataset) or (_has_items(type(inner)) and not isinstance(inner, Tensor)):
                    yield from _parts(inner, depth - 1)


def _has_items(kind: type) -> bool:
    return all(isinstance(getattr(kind, name, None), FunctionType) for name in ("__getitem__", "__len__"))


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
