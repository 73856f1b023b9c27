"""Exclusive locks on files, which the kernel releases when their process ends."""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from io import FileIO
from pathlib import Path
from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_held: weakref.WeakSet[FileIO] = weakref.WeakSet()
_told: set[str] = set()


def open_locked(path: str | os.PathLike[str]) -> FileIO:
    """Open a file for appending, made if it is not there, for this process alone; closing it gives it back.

    Neither spawned nor forked processes hold the lock with this one: after its death, SIGKILL included, it is free.

    Args:
        path: The file.

    Returns:
        The file, unbuffered.

    Raises:
        BlockingIOError: Another process holds it, or another open file of this one.
        OSError: The file cannot be opened.
    """
    while True:
        file = FileIO(path, "ab")
        try:
            _lock(file)
            if _still_there(file, path):  # else whoever held it before has removed it
                _held.add(file)
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: FileIO) -> None:
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        folder = str(Path(str(file.name)).parent)
        if not _told:
            warnings.warn(
                f"files in {folder} cannot be locked, so two processes that train in one folder, or resume one run, "
                "are not detected: start only one.",
                stacklevel=4,
            )
        _told.add(folder)


def _still_there(file: FileIO, path: str | os.PathLike[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _forget_in_child() -> None:
    for file in list(_held):
        file.close()  # the parent keeps the lock: it belongs to the open file, which both share until one closes it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
