"""Hash of a training set's contents: two sets that differ in a byte must not share noise."""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any

from pytorch_lightning.utilities.seed import isolate_rng

from dpbench.canonical import Canonical

_READS = frozenset({"open", "sqlite3.connect", "socket.connect"})  # events of `sys.audit`
_NO_RECORDS = ("/proc/", "/sys/", "/dev/")
_CODE = (".py", ".pyc", ".so")  # what an import opens
_watched = threading.local()


def contents_of(dataset: Any) -> tuple[str, Canonical]:
    """Hash of the records that a data set stores.

    The stored bytes are read, never the items (which may be augmented, and then differ each time).

    Args:
        dataset: Map-style.

    Returns:
        Sixty-four hexadecimal digits; and the hasher, whose `gaps` name all that the hash does not cover, files and
        folders that the data set names, and those that its first and its last item open, included.
    """
    canonical = Canonical()
    digest = canonical.digest(dataset).hex()
    canonical.gaps += [*canonical.places, *_read_by_items(dataset)]
    return digest, canonical


def _read_by_items(dataset: Any) -> list[str]:
    """Names of the files, data bases and hosts that the first and the last item open in this thread."""
    examples = getattr(dataset, "examples", dataset)  # of users
    _watch()
    _watched.names = []
    with isolate_rng():
        for position in {0, len(examples) - 1} - {-1}:
            try:
                examples[position]
            except Exception:  # its own lot will say so
                continue
    names = vars(_watched).pop("names")
    return [
        f"what it reads ({name})" for name in names if not name.endswith(_CODE) and not name.startswith(_NO_RECORDS)
    ]


@cache
def _watch() -> None:
    sys.addaudithook(_note)  # for good: nothing removes one


def _note(event: str, arguments: tuple[Any, ...], reads: frozenset[str] = _READS) -> None:
    # Before all else: `id()` is an event, too, and copying a configuration asks for it thousands of times. A default
    # argument, because Python takes the names of a module away before it has ended.
    if event in reads and hasattr(_watched, "names") and not isinstance(arguments[0], int):
        _watched.names.append(str(arguments[0] if event == "open" else arguments[-1]))
