"""New folders that commands write: whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpbench.errors import ConfigurationError
from dpbench.files import replacing


@contextmanager
def new_contents(out: Path) -> Iterator[Path]:
    """An empty folder that becomes `out` when the block ends without an error.

    Raises:
        ConfigurationError: It cannot be written; the old one is still there.
    """
    try:
        with replacing(out) as new:
            new.mkdir(parents=True)
            yield new
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written: {error.strerror}.") from error


def resolve_out(out: Path) -> Path:
    """Resolve the links of a new folder's path.

    Raises:
        ConfigurationError: Something is there, or links lead nowhere.
    """
    try:
        out = out.resolve()
    except (RuntimeError, OSError) as error:  # a loop of links
        raise ConfigurationError(f"{out} cannot be written: {error}.") from error
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigurationError(f"{out} is not empty: choose another folder, or remove it.")
    return out
