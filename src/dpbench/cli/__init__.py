"""The command line: one file for each group of commands, with their parsers, their help and their functions.

Nothing here imports PyTorch, Hydra or pandas before a command runs, so that help answers at once.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.metadata import entry_points

from dpbench import __version__
from dpbench.cli import check, experiments, new, privacy, results, train
from dpbench.cli.arguments import Answer, Commands, OneLineParser, print_json
from dpbench.errors import DPBenchError, Interrupted, ReportedByAnotherRank, brief
from dpbench.harness.run.processes import is_first
from dpbench.harness.run.runtime import wait_briefly, warn_in_one_line

_GROUPS = {
    "experiments": experiments.add_parsers,
    "privacy": privacy.add_parsers,
    "results": results.add_parsers,
    "packages of your own": new.add_parsers,
}
_PLUGINS = "dpbench.commands"
"""Group of entry points: functions that add a command to the subparsers, without slow imports."""

# Hydra reads the words of these: argparse would take its flags apart.
_HYDRA_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": train.run,
    "check": check.run,
    "priors": experiments.priors,
}

_EXAMPLES = """\
examples:
  dpbench train hydra.run.dir=runs/demo             real digits, MNIST CNN, DP-SGD, on the CPU
  dpbench train data=mnist strategy.noise_multiplier=1.1 trainer.max_steps=8000
  dpbench account runs/demo --accountant pld --delta 1e-6
  dpbench calibrate --epsilon 3 --delta 1e-5 --sample-rate 0.004 --epochs 60
  dpbench reproduce list                            the papers' tables

dpbench COMMAND --help shows the options and examples of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: Without the program's name; None takes them from the process.

    Returns:
        Exit status: 0, 1 for an error that the user can correct, 2 for wrong usage, 3 for a damaged ledger, 75 for a
        run that reached its time limit unfinished, 130 for Ctrl-C, 143 for SIGTERM (128 and the signal's number).
    """
    if arguments is None:
        # What this process starts (workers, jobs of a queue) looks for no modules in the working directory, either.
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the words of a TAB
        import argcomplete

        argcomplete.autocomplete(parser())
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # where Greek letters cannot be printed
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp_accounting names each order that gives no bound
    wait_briefly()
    warn_in_one_line()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _HYDRA_COMMANDS:
        options = argparse.Namespace(words=words[1:])
        return _one_line_errors(lambda: _HYDRA_COMMANDS[words[0]](options))
    options = _parsed(words)
    return _one_line_errors(lambda: _answer(options))


def parser() -> OneLineParser:
    """Return the parser of all commands."""
    root = OneLineParser(
        "dpbench",
        usage="dpbench [-h] [--version] COMMAND ...",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"dpbench {__version__}")
    # argparse cannot group commands: the description lists them.
    commands = root.add_subparsers(
        prog="dpbench",
        metavar="COMMAND",
        dest="command",
        required=True,
        help=argparse.SUPPRESS,
    )
    lines = ["Differentially private deep learning with PyTorch Lightning: train, compare, and trust the epsilon."]
    for title, add_parsers in {**_GROUPS, "further": _add_plugins}.items():
        first = len(commands.choices)
        add_parsers(commands)
        lines += ["", f"{title}:"]
        for name, command in list(commands.choices.items())[first:]:
            lines.append(f"  {name:<12}{command.description}")
    root.description = "\n".join(lines)
    return root


def _add_plugins(commands: Commands) -> None:
    for entry in entry_points(group=_PLUGINS):
        try:
            entry.load()(commands)
        except Exception as error:  # of a plug-in: other commands go without it
            print(f"dpbench: warning: no command {entry.name}: {entry.value} fails ({brief(error)}).", file=sys.stderr)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    root = parser()
    (commands,) = (action.choices for action in root._actions if isinstance(action, argparse._SubParsersAction))
    name, *options = words or ["--help"]
    if name in commands:
        # Not by the root parser, whose subparsers accept no word of Hydra behind an option.
        parsed: argparse.Namespace = commands[name].parse_intermixed_args(options)
        return parsed
    if not name.startswith("-"):
        near = difflib.get_close_matches(name, commands, 1)
        root.error(f"there is no command {name}." + (f" Did you mean {near[0]}?" if near else ""))
    return root.parse_args([name, *options])  # --help or --version: exits


def _answer(options: argparse.Namespace) -> int:
    """Call a command and print its answer."""
    answer: Answer
    if getattr(options, "json", False):
        with redirect_stdout(sys.stderr):  # what a training or a library prints on the way is no JSON
            answer = options.call(options)
        print_json(answer.facts)
    else:
        answer = options.call(options)
        if answer.text is not None:
            print(answer.text)
    return answer.status


def _one_line_errors(command: Callable[[], int]) -> int:
    """Print user-correctable errors as one line; let bugs show their traceback."""
    try:
        return command()
    except ReportedByAnotherRank:
        return 1
    except Interrupted as error:
        if is_first():
            print(f"dpbench: {error}", file=sys.stderr)
        return error.status
    except DPBenchError as error:
        print(f"dpbench: error: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        package = (error.name or "dpbench").partition(".")[0]
        if package == "dpbench":
            raise
        print(f"dpbench: error: this command needs {package}, which is not installed: pip install it.", file=sys.stderr)
    except KeyboardInterrupt:
        print("dpbench: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (nothing more to say)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        in_the_way = "a file is in the way, " if isinstance(error, FileExistsError | NotADirectoryError) else ""
        print(f"dpbench: error: {where}{in_the_way}{error.strerror or error}", file=sys.stderr)
    return 1
