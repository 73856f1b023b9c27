"""Deprecated names, which work for one more release with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module in which names have changed.

    Args:
        module: Its name.
        names: Old name → new name; with a module before it, where it has moved to another one.
    """

    def getattribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_old_name(f"{module}.{name}", names[name])
        new_module, _, new_name = names[name].rpartition(".")
        return getattr(import_module(new_module or module), new_name)

    return getattribute


class OldAttribute:
    """An attribute or method of a class under its old name.

    Args:
        new: Its name.
    """

    def __init__(self, new: str) -> None:
        self._new = new
        self._old = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_of_old_name(f"{type(instance).__name__}.{self._old}", self._new)
        return getattr(instance, self._new)


def warn_of_old_name(old: str, new: str) -> None:
    """Warn that something is called otherwise now, where the caller's caller says it."""
    message = f"{old} is called {new} now: the old name goes with the next release."
    warnings.warn(message, FutureWarning, stacklevel=3)
