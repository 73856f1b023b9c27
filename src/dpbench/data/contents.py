"""What a training set holds, as one hash: two that differ in a byte must not share noise."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities.seed import isolate_rng

from dpbench.canonical import Canonical
from dpbench.errors import ConfigurationError

_READS = frozenset({"open", "sqlite3.connect", "socket.connect"})  # events of `sys.audit`
_CODE = (".py", ".pyc", ".so")  # what an import opens
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_current = threading.local()


def contents_of(dataset: Any, data_id: str | None = None) -> tuple[str, frozenset[Any]]:
    """Hash of the records that a data set stores.

    The stored bytes are read, never the items (which may be augmented, and then differ each time). Random numbers of
    the data set and the source of its classes are not part of it.

    Args:
        dataset: Map-style.
        data_id: Name and version of the records, where they are read when they are asked for; None: they are in memory.

    Returns:
        Sixty-four hexadecimal digits, and the classes and functions of which the data set is made.

    Raises:
        ConfigurationError: Records lie elsewhere, and no `data_id` names them.
    """
    canonical = Canonical()
    if data_id is not None:
        return canonical.digest(["data_id", data_id]).hex(), frozenset({type(dataset)})
    digest = canonical.digest(dataset)
    elsewhere = [*canonical.unreadable, *_read_by_items(dataset)]
    if elsewhere:
        raise ConfigurationError(
            f"the records of the {type(dataset).__name__} are not in memory ({elsewhere[0]}), so that a run whose "
            "noise can be drawn again cannot tell this training set from another one, with which it would share its "
            "noise: name the records and their version, LotLoader(..., data_id='clinic 2026-11'), or train without a "
            "seed (strategy.secure=true) and without correlated noise."
        )
    return digest.hex(), frozenset(canonical.classes)


def _read_by_items(dataset: Any) -> list[str]:
    """What the first and the last item open, by name."""
    examples = getattr(dataset, "examples", dataset)  # of users
    names: list[str] = []
    with isolate_rng(), _reads_noted(names):
        for position in {0, len(examples) - 1} - {-1}:
            try:
                examples[position]
            except Exception:  # its own lot will say so
                continue
    return [f"it reads {name}" for name in names if not name.endswith(_CODE) and not name.startswith(_SYSTEM)]


@contextmanager
def _reads_noted(names: list[str]) -> Iterator[None]:
    """Note the names of files, data bases and hosts that this thread opens."""
    if not getattr(_reads_noted, "installed", False):
        sys.addaudithook(_note)
        _reads_noted.installed = True  # type: ignore[attr-defined]
    _current.names = names
    try:
        yield
    finally:
        del _current.names


def _note(event: str, arguments: tuple[Any, ...], reads: frozenset[str] = _READS) -> None:
    # Before all else: `id()` is an event, too, and copying a configuration asks for it thousands of times. A default
    # argument, because Python takes the names of a module away before it has ended.
    if event not in reads:
        return
    names: list[str] | None = getattr(_current, "names", None)
    if names is not None and arguments and not isinstance(arguments[0], int):
        names.append(str(Path(str(arguments[0]))) if event == "open" else f"{event} {arguments[-1]}")
