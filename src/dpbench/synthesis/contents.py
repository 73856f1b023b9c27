"""A folder that is written as a whole, and what it may hold before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpbench.errors import ConfigurationError
from dpbench.files import replacing


@contextmanager
def new_contents(out: Path) -> Iterator[Path]:
    """An empty folder that becomes `out` when the block ends without an error.

    Raises:
        ConfigurationError: It cannot be written; what was there is still there.
    """
    try:
        with replacing(out) as new:
            new.mkdir(parents=True)
            yield new
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written: {error.strerror}.") from error


def resolve_out(out: Path, force: bool, card: str, own: re.Pattern[str], what: str) -> Path:
    """Resolve links, and refuse a folder that holds something that nobody asked to replace.

    Args:
        out: The folder; it need not exist.
        force: Whether what is there, if it is of the same kind, is replaced.
        card: The file by which one of that kind is known.
        own: Names that it has.
        what: It is, in words.

    Raises:
        ConfigurationError: It holds something else, or `force` was not said, or its links lead nowhere.
    """
    try:
        out = out.resolve()
    except (RuntimeError, OSError) as error:  # a loop of links
        raise ConfigurationError(f"{out} cannot be written: {error}.") from error
    if out.is_dir() and not any(out.iterdir()):
        return out
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{out} is a file: --out takes a folder.")
    if out.exists() and not force:
        raise ConfigurationError(f"{out} is not empty: choose another folder, or replace it with --force.")
    if out.exists() and not (out / card).is_file():
        raise ConfigurationError(f"{out} holds no {what}, and --force replaces nothing else.")
    names = (path.relative_to(out).as_posix() for path in out.rglob("*"))
    if (foreign := next((name for name in names if not own.fullmatch(name)), None)) is not None:
        raise ConfigurationError(f"{out} also holds {foreign}, and --force replaces {what}s only: move it.")
    return out
