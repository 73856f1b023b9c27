"""The command line: one file a command, which holds its parser, its help and its call.

Nothing here imports PyTorch, Hydra or pandas before a command runs, so that help answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from dpbench import __version__
from dpbench.cli import (
    account,
    audit,
    calibrate,
    compare,
    completion,
    evaluate,
    export,
    priors,
    report,
    reproduce,
    resume,
    sample,
    table,
    train,
    workflow,
)
from dpbench.cli.arguments import Commands, OneLineParser
from dpbench.errors import DPBenchError, Interrupted, ToldElsewhere
from dpbench.run.processes import is_first
from dpbench.run.runtime import wait_briefly


class Command(Protocol):
    """What a file of a command offers."""

    def add_parser(self, commands: Commands) -> None:
        """Describe the command, its options and examples."""

    def run(self, options: argparse.Namespace) -> int:
        """Carry the command out; returns the exit status."""


_OF_HYDRA: dict[str, Command] = {"train": train, "priors": priors}  # which reads their words itself
_COMMANDS: dict[str, Command] = _OF_HYDRA | {
    "resume": resume,
    "account": account,
    "audit": audit,
    "calibrate": calibrate,
    "reproduce": reproduce,
    "workflow": workflow,
    "compare": compare,
    "table": table,
    "report": report,
    "export": export,
    "sample": sample,
    "evaluate": evaluate,
    "completion": completion,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: Without the program's name; None takes them from the process.

    Returns:
        Exit status: 0, 1 for an error that a user can mend, 2 for wrong usage, 3 for a damaged ledger, 75 for a run
        whose time was over before it was finished, 130 for Ctrl-C, 143 for SIGTERM (128 and the signal's number).
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # where Greek letters cannot be printed
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp_accounting names each order that gives no bound
    wait_briefly()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _OF_HYDRA:
        options = argparse.Namespace(command=words[0], words=words[1:])
    else:
        options = _parsed(words)
    return _one_line_errors(lambda: _COMMANDS[options.command].run(options))


def parser() -> OneLineParser:
    """The parser of all commands."""
    whole = OneLineParser(
        "dpbench",
        description="Differentially private deep learning with PyTorch Lightning: train, compare, and trust the "
        "epsilon.",
        epilog=train.EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"dpbench {__version__}")
    commands = whole.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for command in _COMMANDS.values():
        command.add_parser(commands)
    return whole


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    whole = parser()
    if words and not words[0].startswith("-") and words[0] not in _COMMANDS:
        near = difflib.get_close_matches(words[0], _COMMANDS, 1)
        whole.error(f"there is no command {words[0]}." + (f" Did you mean {near[0]}?" if near else ""))
    options, rest = whole.parse_known_args(words or ["--help"])
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        whole.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # words after options, which argparse does not take by itself
        options.words = [*options.words, *rest]
    return options


def _one_line_errors(command: Callable[[], int]) -> int:
    """Print what a user can mend as one line; let bugs show their traceback."""
    try:
        return command()
    except ToldElsewhere:
        return 1
    except Interrupted as error:
        if is_first():
            print(f"dpbench: {error}", file=sys.stderr)
        return error.status
    except DPBenchError as error:
        print(f"dpbench: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("dpbench: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (nothing more to say)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        in_the_way = "a file is in the way, " if isinstance(error, FileExistsError | NotADirectoryError) else ""
        print(f"dpbench: error: {where}{in_the_way}{error.strerror or error}", file=sys.stderr)
    return 1
