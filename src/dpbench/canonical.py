"""Hashes of objects by their contents: the same in every process and on every machine.

Settings and data sets are identified by it: by all that pickling would save of them, and by facts that the source of
their classes lacks (closures, globals, attributes of classes that were set later). Objects without bytes are gaps.
"""

from __future__ import annotations

import contextlib
import contextvars
import copyreg
import dataclasses
import dis
import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np

_LIBRARIES = {"dpbench", "torch", "torchvision", "torchmetrics", "pytorch_lightning", "lightning", "numpy", "builtins"}
"""Their classes are known by their versions; ours too."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_WRAPPERS = (property, functools.cached_property, staticmethod, classmethod)
_WRAPPED = ("fget", "fset", "func", "__func__")
_CACHES = {"_abc_impl"}  # of isinstance(), in classes


class Canonical:
    """Hashes of objects.

    Args:
        known: Hashes of objects that something else covers, by id.

    Attributes:
        gaps: Objects without bytes: open files, connections, locks.
        places: Files that the objects name, and folders that are attributes of foreign objects.
        packages: Packages of the classes, functions and modules that were met; their source is not covered.
    """

    def __init__(self, known: Mapping[int, bytes] | None = None) -> None:
        self.gaps: list[str] = []
        self.places: list[str] = []
        self.packages: set[str] = set()
        self._digests = dict(known or {})
        self._alive: list[Any] = []  # so that no two objects share an id

    def digest(self, value: Any) -> bytes:
        """32 bytes for an object: plain data, a container, an array, a function, or an instance of any class."""
        if id(value) in self._digests:
            return self._digests[id(value)]
        self._alive.append(value)
        # Until it has been read: by this a circle ends.
        self._digests[id(value)] = b"%32d" % len(self._digests)
        hasher = hashlib.sha256()
        try:
            for part in self._parts(value):
                hasher.update(part)
        except Exception:  # an open file, a connection, a generator; or whatever else pickling runs into
            self.gaps.append(f"a {name_of(type(value))}")
        self._digests[id(value)] = hasher.digest()
        return self._digests[id(value)]

    def _part(self, value: Any) -> bytes:
        """Bytes of an entry of a container: itself if it is short, else its hash."""
        return self._plain(value) if isinstance(value, _PLAIN) else self.digest(value)

    def _plain(self, value: Any) -> bytes:
        if isinstance(value, str) and os.path.isfile(value):
            self.places.append(f"the file {value}")
        # Of a float all digits, in a notation that no version of Python rounds.
        return _words(type(value).__name__, value.hex() if isinstance(value, float) else value)

    def _parts(self, value: Any) -> Iterator[Any]:
        import torch

        cls = type(value)
        if isinstance(value, _PLAIN):
            yield self._plain(value)
        elif cls in (np.ndarray, np.memmap) and not value.dtype.hasobject:
            yield _words("array", value.dtype.str, value.shape)
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            yield _words("tensor", str(value.dtype), tuple(value.shape))
            yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            yield from map(self.digest, vars(value).items())
        elif cls is dict:
            yield _words("mapping", len(value))
            yield from map(self._part, chain(*value.items()))
        elif isinstance(value, list | tuple) and not hasattr(value, "__dict__"):
            yield _words("sequence", len(value))
            yield from map(self._part, value)
        elif cls in (set, frozenset):
            yield _words("set", len(value))
            # Sets come in another order in each process.
            yield from sorted(map(self._part, value))
        elif isinstance(value, types.CodeType):
            # What a function does, without where it stands.
            yield self.digest([value.co_code, value.co_names, value.co_consts, value.co_exceptiontable])
        elif isinstance(value, contextlib._GeneratorContextManager):  # a decorator: made anew at each call
            yield self.digest([value.func, value.args, value.kwds])
        elif isinstance(value, contextvars.ContextVar):
            yield self.digest([value.name, value.get(None)])
        elif isinstance(value, _WRAPPERS):
            yield self.digest([getattr(value, name, None) for name in _WRAPPED])
        elif isinstance(value, type | types.FunctionType | types.ModuleType):
            yield self._name(value)
            yield from self._code(value)
        else:
            yield _words("object", name_of(cls))
            yield from self._object(value)

    def _name(self, value: Any) -> bytes:
        """Name of a class, a function or a module; its source is hashed elsewhere."""
        if is_foreign(value):
            self.packages.add(package_of(value))
        return _words("callable", name_of(value))

    def _code(self, value: Any) -> Iterator[bytes]:
        """Facts of a class or a function that its source lacks."""
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            yield self.digest([*cells, value.__defaults__, value.__kwdefaults__])
            if is_foreign(value):
                # Lambdas share their names, and a notebook has no source file.
                yield self.digest([value.__code__, vars(value)])
                for entry in _globals_of(value):
                    is_in_file = isinstance(entry, type | types.FunctionType) and entry.__module__ != "__main__"
                    yield self._name(entry) if is_in_file else self.digest(entry)
        elif isinstance(value, type) and is_foreign(value):
            yield self.digest(value.__bases__)
            for name, attribute in vars(value).items():
                if isinstance(attribute, types.FunctionType) or not (name.startswith("__") or name in _CACHES):
                    yield self.digest((name, attribute))

    def _object(self, value: Any) -> Iterator[bytes]:
        """Parts of an object that pickling would save."""
        cls = type(value)
        if dataclasses.is_dataclass(value) and cls.__dataclass_params__.frozen:
            self._name(cls)
            yield from self._code(cls)
            # Its fields alone, not what it has cached beside them. A new option changes nothing at its default.
            for field in sorted(dataclasses.fields(value), key=lambda field: field.name):
                entry = getattr(value, field.name)
                is_default = type(entry) is type(field.default) and entry == field.default
                if not (is_default and isinstance(entry, _PLAIN)):
                    yield _words(field.name)
                    yield self._part(entry)
            return
        reduce = copyreg.dispatch_table.get(cls)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):  # something that is found by its name
            yield self._name(value)
            yield self.digest([reduced, getattr(value, "__wrapped__", None)])
            return
        function, arguments, state, items, pairs = [*reduced, None, None, None][:5]
        if isinstance(value, PurePath):
            self._plain(str(value))
        if isinstance(state, dict) and is_foreign(cls):
            for entry in state.values():
                if isinstance(entry, str | PurePath) and os.path.isdir(entry):
                    self.places.append(f"the folder {entry}")
        yield self.digest([function, arguments, state, list(items or ()), list(pairs or ())])


def digest_of(value: Any) -> str:
    """Hash an object by its contents, to sixty-four hexadecimal digits.

    >>> digest_of({"lr": 0.1}) == digest_of({"lr": 0.1}), digest_of({"lr": 0.1}) == digest_of({"lr": 0.2})
    (True, False)
    """
    return Canonical().digest(value).hex()


def package_of(value: Any) -> str:
    """The first part of the name of the module that a class, a function or a module is of."""
    module = getattr(value, "__module__", None) or getattr(value, "__name__", "builtins")
    return str(module).partition(".")[0]


def is_foreign(value: Any) -> bool:
    """Return whether a class, a function or a module is neither ours nor Python's nor of the libraries above."""
    return package_of(value) not in _LIBRARIES | sys.stdlib_module_names


def name_of(cls: Any) -> str:
    """Module and name of a class or function; of ours without the file, which may move."""
    module = str(getattr(cls, "__module__", ""))
    name = getattr(cls, "__qualname__", None) or getattr(cls, "__name__", type(cls).__qualname__)
    return f"dpbench.{name}" if module.startswith("dpbench.") else f"{module}.{name}"


def _globals_of(function: types.FunctionType) -> list[Any]:
    """Values of the global variables that a function and the functions within it read."""
    names = set()
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        names |= {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return [function.__globals__[name] for name in sorted(names & function.__globals__.keys())]


def _words(*parts: object) -> bytes:
    return repr(parts).encode()
