"""The command line: `dpbench train | resume | account | table | priors`; imports are lazy, so that help is quick."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_EXAMPLES = """\
examples:
  dpbench train                                     real digits, MNIST CNN, DP-SGD, on the CPU
  dpbench train data=mnist strategy.noise_multiplier=1.1 trainer.max_steps=8000
  dpbench train strategy.noise_multiplier=null strategy.target_epsilon=3
  dpbench train strategy=none                       the baseline without privacy
  dpbench train -m optimizer.lr=0.1,0.2 seed=0,1    a sweep (Hydra multirun)
  dpbench train --cfg job                           print the composed configuration
  dpbench resume outputs/2026-01-31/12-00-00-demo   continue an interrupted run
  dpbench account outputs/2026-01-31/12-00-00-demo --accountant pld --delta 1e-6
  dpbench table multirun/2026-01-31/12-00-00        finished runs side by side
"""

_TRAIN_HELP = """\
usage: dpbench train [-m] [--cfg job] [GROUP=NAME ...] [KEY=VALUE ...]

Train and test one model; with -m, one for each combination of comma-separated values.

{groups}

Any key of the composed configuration can be overridden; `dpbench train --cfg job` prints it.

{examples}"""


_PRIORS_HELP = """\
usage: dpbench priors GROUP=NAME ... [KEY=VALUE ...]

Train without noise on PUBLIC data, and estimate how often gradients fall under each hypothesis of the error correction.
Takes what `dpbench train` takes, with strategy=discretized (or strategy=dpsgd and a correction_threshold).

example:
  dpbench priors data=fashion_mnist strategy=discretized trainer.max_steps=200
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: Without the program's name; None takes them from the process.

    Returns:
        Exit status: 0, 1 for an error that a user can mend, 2 for wrong usage, 3 for a damaged ledger, 130 for
        Ctrl-C, 143 for SIGTERM.
    """
    args = list(sys.argv[1:] if arguments is None else arguments)
    if args[:1] == ["train"]:
        return _guarded(lambda: _train(args[1:]))
    if args[:1] == ["priors"]:
        return _guarded(lambda: _priors(args[1:]))
    options = _parser().parse_args(args or ["--help"])
    return _guarded(lambda: int(options.run(options)))


def _parser() -> argparse.ArgumentParser:
    from dpbench import __version__

    raw = argparse.RawDescriptionHelpFormatter
    description = "Differentially private deep learning with PyTorch Lightning: train, compare, and trust the epsilon."
    parser = argparse.ArgumentParser("dpbench", description=description, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"dpbench {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("train", help="train and test a model (Hydra overrides)", add_help=False)
    commands.add_parser("priors", help="priors of the error correction, from public data", add_help=False)
    resume = commands.add_parser(
        "resume",
        help="continue an interrupted run",
        usage="dpbench resume RUN [KEY=VALUE ...]",
        epilog="example:\n  dpbench resume outputs/2026-01-31/12-00-00-demo trainer.max_steps=2000",
        formatter_class=raw,
    )
    resume.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    resume.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as trainer.max_steps=2000")
    resume.set_defaults(run=_resume)
    account = commands.add_parser(
        "account",
        help="epsilon of a run, from its ledger",
        epilog="example:\n  dpbench account outputs/2026-01-31/12-00-00-demo --delta 1e-5 --accountant pld --json",
        formatter_class=raw,
    )
    account.add_argument("path", type=Path, metavar="RUN_OR_LEDGER", help="a run's folder, or a ledger.jsonl")
    account.add_argument("--delta", type=float, help="delta (default: the run's own)")
    account.add_argument("--accountant", default="rdp", metavar="NAME", help="rdp (default) or pld")
    account.add_argument("--json", action="store_true", help="print JSON")
    account.set_defaults(run=_account)
    table = commands.add_parser(
        "table",
        help="finished runs side by side",
        epilog="example:\n  dpbench table multirun/2026-01-31/12-00-00",
        formatter_class=raw,
    )
    table.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of runs or sweeps")
    table.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")
    table.set_defaults(run=_table)
    return parser


def _guarded(command: Callable[[], int]) -> int:
    """Print what a user can mend as one line; let bugs show their traceback."""
    from dpbench.errors import DPBenchError, Interrupted

    try:
        return command()
    except Interrupted as error:
        print(f"dpbench: {error}", file=sys.stderr)
        return 128 + error.number
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
        print(f"dpbench: error: {where}{error.strerror or error}", file=sys.stderr)
    return 1


def _train(args: list[str]) -> int:
    from dpbench.training.launch import conf_dir, groups_of, launch

    if "-h" in args or "--help" in args:
        listing = "\n".join(f"  {group + '=':<13}{' | '.join(names)}" for group, names in groups_of(conf_dir()).items())
        print(_TRAIN_HELP.format(groups=listing, examples=_EXAMPLES))
        return 0
    return launch(args)


def _priors(args: list[str]) -> int:
    if not args or "-h" in args or "--help" in args:
        print(_PRIORS_HELP)
        return 0
    from dpbench.training.launch import launch
    from dpbench.training.priors import priors_job

    with TemporaryDirectory() as folder:  # nothing is kept
        return launch([*args, f"hydra.run.dir={folder}/run", "hydra/job_logging=none"], job=priors_job)


def _resume(options: Any) -> int:
    from dpbench.training.launch import launch_again

    return launch_again(options.folder, options.overrides)


def _account(options: Any) -> int:
    from dpbench.errors import DPBenchError
    from dpbench.results.account import account

    logging.getLogger("absl").setLevel(logging.ERROR)  # dp_accounting names each order that gives no bound
    path = options.path / "ledger.jsonl" if options.path.is_dir() else options.path
    if not path.exists() and (options.path / "result.json").exists():
        raise DPBenchError(f"{options.path} trained without privacy: it has no ledger, epsilon is infinite.")
    text, damage = account(path, options.delta, options.accountant, options.json)
    print(text)
    if damage is not None:
        print(f"dpbench: error: {path}: {damage}; epsilon counts what is readable: a lower bound.", file=sys.stderr)
        return 3
    return 0


def _table(options: Any) -> int:
    from dpbench.results.table import collect, markdown

    table = collect(options.folders)
    print(table.to_csv(index=False) if options.csv else markdown(table))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
