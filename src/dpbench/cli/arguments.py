"""Parsers of the command line: types of its options, and errors of one line."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeAlias


class OneLineParser(argparse.ArgumentParser):
    """Says in one line what was wrong.

    Attributes:
        late_epilog: Makes the end of the help, where that needs slow imports: called when the help is shown.
    """

    late_epilog: Callable[[], str] | None = None

    def format_help(self) -> str:
        """The help, with an epilog that is found out only when it is wanted."""
        if self.late_epilog is not None:
            self.epilog = self.late_epilog()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"dpbench: error: {message}{end} See {self.prog} --help.\n")


Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"  # what add_subparsers returns


def add_command(
    commands: Commands, name: str, help: str, epilog: str | Callable[[], str] = "", **options: Any
) -> OneLineParser:
    """Add the parser of a command.

    Args:
        commands: Where to.
        name: What a user types.
        help: One line for the list of all commands.
        epilog: The end of its own help, with examples; a function where that needs slow imports.
        options: Further ones of the parser.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=help, formatter_class=raw, **options)
    if callable(epilog):
        parser.late_epilog = epilog
    else:
        parser.epilog = epilog
    return parser


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a command unpickle what a run's checkpoint holds."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="the run is your own: its checkpoint may hold objects, and reading these can run any code",
    )


def place(word: str) -> Path:
    """A path; an empty word (of a variable that is not set, say) would be the folder that we are in."""
    if not word.strip():
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder (. is this one)")
    return Path(word)


def text(word: str) -> str:
    """A word that is not empty."""
    place(word)
    return word


def folder(word: str) -> Path:
    """A folder that is there, or can be made."""
    path = place(word)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file: name a folder")
    return _writable(path)


def _writable(path: Path) -> Path:
    """Find out now, not when there is something to write."""
    above = path if path.is_dir() else next(one for one in path.absolute().parents if one.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {above} is a file")
    if not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: no permission in {above}")
    return path


def whole(word: str) -> int:
    """A whole number that is one of floating point too, also as 1e6."""
    number: float = math.inf
    for kind in (float, int):  # exactly, where it can be
        with suppress(ValueError):
            number = kind(word)
    if not abs(number) < 2**63 or number != int(number):
        shown = word if len(word) <= 40 else f"{word[:37]}..."
        raise argparse.ArgumentTypeError(f"must be a whole number (below 2^63), not {shown}")
    return int(number)


def png(word: str) -> Path:
    """The path of a picture that can be written."""
    return _file(word, ".png")


def html(word: str) -> Path:
    """The path of a page that can be written."""
    return _file(word, ".html")


def _file(word: str, ending: str) -> Path:
    path = place(word)
    if path.suffix != ending or path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} {'is a folder' if path.is_dir() else f'should end in {ending}'}")
    return _writable(path)
