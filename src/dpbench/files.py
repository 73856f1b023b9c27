"""Atomic writing of files: whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TORN = re.compile(r"\..+\.\d+")  # as `replacing` names them


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file or folder that replaces `path` when the block ends without an error.

    However the process ends, there is the old one or the new one, whole. A folder that is replaced must be empty.

    Args:
        path: Path of the file or folder; it need not exist, its parent must.

    Raises:
        OSError: It cannot be written; the old one is still there.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    _remove(new)
    try:
        yield new
        os.replace(new, path)
    except OSError as error:
        if error.filename in (None, str(new)):  # a full disk names no file, and nobody has heard of the new one
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        _remove(new)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write text, whole or not at all: a crash or a full disk leaves the old file."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write JSON, whole or not at all; numbers must be finite."""
    write_atomically(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def remove_torn(folder: Path) -> None:
    """Remove unfinished files of killed processes; only while no other process writes there."""
    for path in folder.rglob(".*"):
        if _TORN.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def is_full_disk(error: OSError) -> bool:
    """Return whether a file could not be written because the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def from_here(path: Path) -> str:
    """A path as a user in the present folder would name it."""
    folder = Path.cwd()
    return os.fspath(path.relative_to(folder) if path.is_relative_to(folder) else path)


def typed(path: Path) -> str:
    """The same as it is typed in a shell."""
    return shlex.quote(from_here(path))
