"""What Google-style docstrings say of each argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n)+)", re.M)
_ENTRY = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?: ((?:.+\n?)(?:^ {8}.*\n?)*)", re.M)


@cache
def arguments(thing: Callable[..., Any]) -> dict[str, str]:
    """Name → what the docstring of a function, or of a class and its bases, says of an argument, in one line."""
    meanings: dict[str, str] = {}
    for documented in thing.__mro__ if isinstance(thing, type) else (thing,):
        for name, text in _entries(inspect.cleandoc(documented.__doc__ or "")):
            meanings.setdefault(name, text)
    return meanings


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    for section in _SECTION.findall(docstring + "\n"):
        for name, text in _ENTRY.findall(section):
            yield name, " ".join(text.split())
