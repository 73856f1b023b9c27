"""Parts that all commands share: parsers, types of options, and printing of answers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from dpbench.errors import ClassNotFound, ConfigurationError
from dpbench.files import typed


@dataclass(frozen=True)
class Answer:
    """Result of a command.

    Attributes:
        text: Text for the terminal; None if the command printed while it ran.
        facts: The same for `--json`, of plain types.
        status: Exit status.
    """

    text: str | None = None
    facts: Any = None
    status: int = 0


class OneLineParser(argparse.ArgumentParser):
    """Reports wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(2, f"dpbench: error: {message}{end} See {self.prog} --help.\n")


Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"  # what add_subparsers returns


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    call: Callable[[argparse.Namespace], Answer] | None = None,
    **options: Any,
) -> OneLineParser:
    """Add the parser of a command.

    Args:
        commands: All commands.
        name: Name that a user types.
        summary: One line for its own help and for the list of all commands.
        call: Carries the command out; None if Hydra reads its words.
        options: Further arguments of the parser, such as `epilog`.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, description=summary, formatter_class=raw, **options)
    parser.set_defaults(call=call)
    return parser


def add_runs(parser: argparse.ArgumentParser, help: str) -> None:
    """Add the positional argument of commands that read several runs.

    Args:
        parser: The command's parser.
        help: Description of the values that it accepts.
    """
    parser.add_argument("sources", type=place, nargs="+", metavar="RUN_OR_SWEEP", help=help)


def add_json(parser: Any) -> None:
    """Add the option that prints facts in place of text."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a command unpickle the objects in a run's checkpoint."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="unpickle objects in the checkpoint, which can execute arbitrary code: only for a run of your own",
    )


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option without which nothing but installed packages is imported for a run."""
    parser.add_argument(
        "--config-dir",
        type=place,
        metavar="FOLDER",
        help="as in the run's own command: your own classes are imported from its parent folder",
    )


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """Add words that Hydra reads; a shell completes them."""
    action = parser.add_argument("words", nargs="*", default=[], metavar="KEY=VALUE", help=help)
    action.completer = _overrides  # type: ignore[attr-defined]  # where argcomplete looks


def _overrides(prefix: str, **_: Any) -> list[str]:
    """The choices GROUP=NAME that a shell offers.

    Hydra's own completion composes the configuration at each TAB, which takes seconds.

    Args:
        prefix: Start of the word that is completed.
    """
    from dpbench.harness.run.search_path import conf_dir, groups_of, plugin_dirs

    words = []
    for group, names in groups_of(conf_dir(), *plugin_dirs()).items():
        words += [f"{group}={name}" for name in names]
    return words


@contextmanager
def own_code(options: argparse.Namespace, run: Path) -> Iterator[None]:
    """Import classes from the parent folder of a command's --config-dir, and say where one is missing.

    Args:
        options: The command's options.
        run: Folder of the run; the folder that its own command named is suggested, and never imported from.

    Raises:
        ConfigurationError: --config-dir is no folder, or is missing.
    """
    from dpbench.harness.run.search_path import code_folder, imports_from
    from dpbench.harness.runs.folder import RunFolder

    named = options.config_dir
    with imports_from(code_folder(named)):
        try:
            yield
        except ClassNotFound as error:
            earlier = RunFolder(run).config_dir
            if named is not None or earlier is None:
                raise
            raise ConfigurationError(
                f"{str(error).rstrip('.')}. The run's own command had --config-dir {typed(Path(earlier))}: repeat it, "
                "if that code is yours."
            ) from error


def note(line: str) -> None:
    """Print a remark where it is not mistaken for a part of the answer."""
    print(f"dpbench: note: {line}", file=sys.stderr)


def print_json(facts: Any) -> None:
    """Print facts as JSON, their keys in the order that a command gives them.

    Raises:
        ValueError: A number is not finite: commands say None instead.
    """
    print(json.dumps(facts, indent=2, allow_nan=False, default=str))


def place(word: str) -> Path:
    """Read a path; an empty word (of an unset variable, say) would name the present folder."""
    if not word.strip():
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder (. is this one)")
    return Path(word)


def folder(word: str) -> Path:
    """Read the path of a folder that exists or can be made."""
    path = place(word)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a file: name a folder")
    return _writable(path)


def file(word: str) -> Path:
    """Read the path of a file that can be written."""
    path = place(word)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    return _writable(path)


def picture(word: str) -> Path:
    """Read the path of a picture that can be written."""
    path = file(word)
    if path.suffix not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{path} should end in .png or .pdf")
    return path


def _writable(path: Path) -> Path:
    # Refused when the command starts: its result may take hours.
    parent = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    if any(folder.is_file() for folder in path.absolute().parents) or not os.access(parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def integer(word: str) -> int:
    """Read a whole number, also one like 1e6."""
    with suppress(ArithmeticError, ValueError):
        number = Decimal(word)
        if abs(number) < 2**63 and number == int(number):
            return int(number)
    raise argparse.ArgumentTypeError(f"must be a whole number (below 2^63), not {word:.40}")
