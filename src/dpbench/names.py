"""Names that packages of dpbench have from rooms above them: entry points in the group that has the package's name."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def from_capability(package: str, name: str) -> Any:
    """Import a name of a package from its capability: the `__getattr__` of the package.

    Raises:
        AttributeError: No capability has it.
    """
    if not name.startswith("_"):
        for entry in entry_points(group=package, name=name):
            return entry.load()
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
