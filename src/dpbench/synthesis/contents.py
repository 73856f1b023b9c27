"""What a folder that is written as a whole may already hold."""

from __future__ import annotations

import re
from pathlib import Path

from dpbench.errors import ConfigurationError


def refuse_other_contents(out: Path, force: bool, card: str, own: re.Pattern[str], what: str) -> None:
    """Refuse a folder that holds something that nobody asked to replace.

    Args:
        out: The folder; it need not exist.
        force: Whether what is there, if it is of the same kind, is replaced.
        card: The file by which one of that kind is known.
        own: Names that it has.
        what: It is, in words.

    Raises:
        ConfigurationError: It holds something else, or `force` was not said.
    """
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{out} is a file: --out takes a folder.")
    if out.exists() and not force:
        raise ConfigurationError(f"{out} is not empty: choose another folder, or replace it with --force.")
    if out.exists() and not (out / card).is_file():
        raise ConfigurationError(f"{out} holds no {what}, and --force replaces nothing else.")
    names = (path.relative_to(out).as_posix() for path in out.rglob("*"))
    if (foreign := next((name for name in names if not own.fullmatch(name)), None)) is not None:
        raise ConfigurationError(f"{out} also holds {foreign}, and --force replaces {what}s only: move it.")
