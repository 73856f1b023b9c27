"""Hashes of objects by their contents: the same in every process and on every machine.

Settings and data sets are known by it. Names are those of classes and attributes; what equals its default is left out,
so that an option that is new changes nothing of what was there before.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import inspect
import os
import random
import sys
import types
from collections.abc import Iterator, Mapping, Set
from functools import cache, partial
from pathlib import PurePath
from typing import Any

import numpy as np

_OURS = "dpbench."
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LONGEST_PATH = 1024
_LIBRARIES = {"dpbench", "torch", "torchvision", "torchmetrics", "pytorch_lightning", "lightning", "numpy"}
"""Their classes are known by their versions; ours too."""
_SAMPLED_NAMES = 3  # of a list of names that stands beside the name of a folder
_WITHOUT_CONTENT = {
    "_thread.lock",
    "_thread.RLock",
    "logging.Logger",
    "numpy.random._generator.Generator",
    "numpy.random.mtrand.RandomState",
    "torch._C.Generator",
}
"""Classes whose state determines nothing: locks, logs, and random numbers, which move on."""


class Canonical:
    """Hashes of objects, by all that pickling would save of them.

    Attributes:
        unreadable: What the hashes do not cover: open files, connections, names of files. Empty where they cover all.
        classes: Classes and functions that were met, whose source is not covered.
    """

    def __init__(self) -> None:
        self.unreadable: list[str] = []
        self.classes: set[Any] = set()
        self._digests: dict[int, bytes] = {}
        self._open: dict[int, int] = {}  # objects that are being read, by which circles end
        self._alive: list[Any] = []  # so that no two objects share an id

    def digest(self, value: Any) -> bytes:
        """32 bytes for an object: plain data, a container, an array, a function, or an instance of any class."""
        if id(value) in self._digests:
            return self._digests[id(value)]
        if id(value) in self._open:
            return hashlib.sha256(b"circle %d" % self._open[id(value)]).digest()
        self._open[id(value)] = len(self._open)
        hasher = hashlib.sha256()
        for part in self._parts(value):
            hasher.update(part)
        del self._open[id(value)]
        digest = hasher.digest()
        if not isinstance(value, _PLAIN):
            self._alive.append(value)
            self._digests[id(value)] = digest
        return digest

    def _part(self, value: Any) -> bytes:
        """What a container holds: itself if it is short, else its hash."""
        if isinstance(value, _PLAIN):
            return b"".join(self._plain(value))
        return self.digest(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        if isinstance(value, _PLAIN):
            yield from self._plain(value)
        elif isinstance(value, enum.Enum):
            yield _words(name_of(type(value)), value.name)
        elif isinstance(value, PurePath):
            yield _words("path", str(value))
            self._note_file(str(value))
        elif isinstance(value, np.ndarray | np.generic):
            yield from self._array(np.asarray(value))
        elif _is_of_torch(value):
            yield from self._tensor(value)
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | partial):
            yield from self._callable(value)
        elif isinstance(value, dict):
            yield _words("mapping", len(value))
            for key, entry in value.items():
                yield self._part(key)
                yield self._part(entry)
        elif isinstance(value, list | tuple | range):
            yield _words("sequence", len(value))
            for entry in value:
                yield self._part(entry)
        elif isinstance(value, Set):
            yield _words("set", len(value))
            # Sets come in another order in each process.
            yield from sorted(self._part(entry) for entry in value)
        else:
            yield from self._object(value)

    def _plain(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, str):
            self._note_file(value)
        # Of a float all digits, in a notation that no version of Python rounds.
        text = value.hex() if isinstance(value, float) else value
        yield _words(type(value).__name__, text)

    def _note_file(self, name: str, folder: str = "") -> None:
        """Note a name of a file: what it holds is not covered."""
        path = os.path.join(folder, name)
        may_be_path = len(path) <= _LONGEST_PATH and "\n" not in path and "\0" not in path
        if may_be_path and os.path.isfile(path):
            self.unreadable.append(f"the file {path}")

    def _array(self, value: np.ndarray[Any, Any]) -> Iterator[Any]:
        yield _words("array", value.dtype.str, value.shape)
        if value.dtype.hasobject:
            for entry in value.reshape(-1).tolist():
                yield self._part(entry)
        elif value.size:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8)

    def _tensor(self, value: Any) -> Iterator[Any]:
        import torch

        if not isinstance(value, torch.Tensor):
            yield _words("word", str(value))
            return
        yield _words("tensor", str(value.dtype), tuple(value.shape))
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            self.unreadable.append(f"a tensor of layout {value.layout} on {value.device.type}")
        elif value.numel():
            yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()

    def _callable(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, partial):
            yield _words("partial")
            yield self.digest([value.func, *value.args, value.keywords])
            return
        if isinstance(value, types.MethodType):
            yield _words("method", value.__name__)
            yield self._part(value.__self__)
            return
        yield _words("callable", name_of(value))
        self.classes.add(value)
        if isinstance(value, types.FunctionType):
            if not str(value.__module__).startswith(_OURS):
                yield from _code(value.__code__)
                yield self.digest(_globals_of(value))
            # Ours too may close over other values than the last time.
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            yield self.digest([*cells, value.__defaults__, value.__kwdefaults__])
        elif isinstance(value, type):
            for cls in filter(is_foreign, value.__mro__):
                yield from self._class(cls)

    def _class(self, cls: type) -> Iterator[bytes]:
        """What its source does not say of a class: attributes, and globals that it reads, may have been set later."""
        for name, attribute in sorted(vars(cls).items()):
            function = _function_of(attribute)
            if function is not None:
                if cls.__module__ == "__main__":  # a notebook has no source file
                    yield _words(name)
                    yield from _code(function.__code__)
                yield self.digest(_globals_of(function))
            elif not name.startswith("__") and is_data(attribute):
                yield _words(name)
                yield self._part(attribute)

    def _object(self, value: Any) -> Iterator[bytes]:
        """What pickling would save of an object, without what equals its default."""
        cls = type(value)
        yield _words("object", name_of(cls))
        if name_of(cls) in _WITHOUT_CONTENT or isinstance(value, random.Random | types.ModuleType):
            return
        self.classes.add(cls)
        if dataclasses.is_dataclass(value) and cls.__dataclass_params__.frozen:
            # Its fields alone, not what it has cached beside them.
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            yield from self._attributes(cls, fields)
            return
        try:
            function, arguments, *optional = value.__reduce_ex__(4)
        except Exception:  # an open file, a connection, a generator
            self.unreadable.append(f"a {name_of(cls)}")
            return
        # The protocol of pickle: state, entries of a list and pairs of a dictionary may be left out.
        state, items, pairs = [*optional, None, None, None][:3]
        if getattr(function, "__name__", "") != "__newobj__":
            yield self.digest(function)
        yield self.digest([argument for argument in arguments if argument is not cls])
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # with __slots__
            state = {**(state[0] or {}), **state[1]}
        if isinstance(state, dict):
            yield from self._attributes(cls, state)
        else:
            yield self._part(state)
        yield self.digest(list(items or ()))
        yield self.digest([list(pair) for pair in pairs or ()])

    def _attributes(self, cls: type, state: Mapping[str, Any]) -> Iterator[bytes]:
        defaults = defaults_of(cls)
        for name, value in sorted(state.items(), key=lambda item: str(item[0])):
            if not is_default(value, defaults.get(name, inspect.Parameter.empty)):
                yield _words(name)
                yield self._part(value)
        self._note_files_in_folders(state)

    def _note_files_in_folders(self, state: Mapping[str, Any]) -> None:
        """Note files that an object names by a folder and a list of names: a data set that reads them when asked."""
        folders = []
        names: list[Any] = []
        for value in state.values():
            if isinstance(value, str | PurePath) and os.path.isdir(value):
                folders.append(str(value))
            elif isinstance(value, list | tuple):
                names += value[:_SAMPLED_NAMES]
        for folder in folders:
            for name in names:
                if isinstance(name, str | PurePath):
                    self._note_file(str(name), folder)


def digest_of(value: Any) -> str:
    """Sixty-four hexadecimal digits for what an object says.

    >>> digest_of({"lr": 0.1}) == digest_of({"lr": 0.1}), digest_of({"lr": 0.1}) == digest_of({"lr": 0.2})
    (True, False)
    """
    return Canonical().digest(value).hex()


def is_default(value: Any, default: Any) -> bool:
    """Whether a plain value is the default of its option."""
    return isinstance(value, _PLAIN) and type(value) is type(default) and value == default


@cache
def defaults_of(cls: type) -> dict[str, Any]:
    """Defaults of the options of a class, by name."""
    if dataclasses.is_dataclass(cls):
        return {field.name: field.default for field in dataclasses.fields(cls)}
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {option.name: option.default for option in parameters if option.default is not option.empty}


def is_foreign(cls: type) -> bool:
    """Whether somebody else than we, Python and the libraries below have written a class."""
    package = cls.__module__.partition(".")[0]
    if package == "__main__":
        return True
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


def is_data(value: Any) -> bool:
    """Whether a value is plain: numbers, words, arrays, and containers and namespaces of such."""
    if isinstance(value, (*_PLAIN, enum.Enum, PurePath, np.ndarray, np.generic)) or _is_of_torch(value):
        return True
    if isinstance(value, list | tuple | Set):
        return all(map(is_data, value))
    if isinstance(value, Mapping):
        return all(map(is_data, value.keys())) and all(map(is_data, value.values()))
    if isinstance(value, type):
        return False
    is_record = isinstance(value, types.SimpleNamespace | argparse.Namespace) or dataclasses.is_dataclass(value)
    return is_record and is_data(vars(value))


def _function_of(attribute: Any) -> types.FunctionType | None:
    """The function behind an attribute of a class: a method, a property, or one in a decorator."""
    function = getattr(attribute, "__func__", attribute)
    function = getattr(attribute, "fget", function)
    if callable(function):
        function = inspect.unwrap(function)
    return function if isinstance(function, types.FunctionType) else None


def _globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Plain values of global variables that a function names."""
    values = {}
    for name in sorted(_names_in(function.__code__)):
        value = function.__globals__.get(name, types)  # no data
        if is_data(value):
            values[name] = value
    return values


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _words(*parts: object) -> bytes:
    return repr(parts).encode()


def name_of(cls: Any) -> str:
    """Module and name of a class or function; of ours without the file, which may move."""
    module = str(getattr(cls, "__module__", ""))
    name = getattr(cls, "__qualname__", type(cls).__qualname__)
    return f"dpbench.{name}" if module.startswith(_OURS) else f"{module}.{name}"


def _is_of_torch(value: Any) -> bool:
    """Whether it is a tensor, or one of torch's words for them, which pickle by name."""
    import torch

    return isinstance(value, torch.Tensor | torch.dtype | torch.device | torch.layout | torch.memory_format)


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # assigned later
        return False
    return True


def _code(code: types.CodeType) -> Iterator[bytes]:
    """What a function does, without where it stands."""
    yield _words(code.co_code, code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield _words(sorted(map(repr, constant)))
        else:
            yield _words(constant)
