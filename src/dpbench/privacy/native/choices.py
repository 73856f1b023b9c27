"""Which of several ways to compute the same is the fastest here: timed once for each machine and shape.

Ways differ in rounding, and a resumed run has to repeat the interrupted one to the bit. So a choice is a file that is
written once and never changed; where no file can be written, nothing is timed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from tempfile import NamedTemporaryFile

from dpbench.privacy import native
from dpbench.privacy.native._trust import mistrust, mistrusted_folder

_REPEATS = 3
_LOST = 20
"""A way that takes so many times as long is timed once; a first call is up to ten times as slow as the next ones."""
Ways = Mapping[str, Callable[[], object]]
_chosen: dict[tuple[object, ...], str] = {}


def fastest(key: tuple[object, ...], ways: Ways) -> str:
    """Name of the way to take for everything that shares `key`; the first one where no choice can be kept.

    Args:
        key: What the time depends on, such as shapes and the number of threads.
        ways: Name → computes the result.
    """
    if key not in _chosen:
        name = _read(key)
        if name is None or name not in ways:
            name = _settle(key, ways)
        _chosen[key] = name
    return _chosen[key]


def _path(key: tuple[object, ...]) -> str:
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return os.path.join(native.cache_folder(), f"choice-{digest[:16]}")


def _read(key: tuple[object, ...]) -> str | None:
    if not _trusted():
        return None
    try:
        with open(_path(key), encoding="utf-8") as file:
            if mistrust(os.fstat(file.fileno())) is not None:
                return None
            return file.readline().strip()
    except OSError:
        return None


def _settle(key: tuple[object, ...], ways: Ways) -> str:
    """Time the ways and write the fastest one's name; the name that holds, which another process may have written."""
    if not _writable():
        return next(iter(ways))
    times = dict.fromkeys(ways, float("inf"))
    for _ in range(_REPEATS):
        for name, way in ways.items():
            if _LOST * min(times.values()) < times[name] < float("inf"):
                continue
            start = time.perf_counter()
            way()
            elapsed = time.perf_counter() - start
            times[name] = min(times[name], elapsed)
    best = min(times, key=times.__getitem__)
    try:
        with NamedTemporaryFile("w", dir=native.cache_folder(), encoding="utf-8") as file:
            file.write(f"{best}\n{key}\n{times}\n")
            file.flush()
            os.link(file.name, _path(key))  # fails if another process was first: its choice holds
    except FileExistsError:
        return _read(key) or best
    except OSError:
        return next(iter(ways))
    return best


@cache
def _writable() -> bool:
    return _trusted() and os.access(native.cache_folder(), os.W_OK)


@cache
def _trusted() -> bool:
    """Whether only the user and root can have written the choices: they decide how a run rounds."""
    try:
        return mistrusted_folder(native.cache_folder(), own=2) is None
    except OSError:
        return False
