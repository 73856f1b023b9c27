"""The command line, one subcommand after another; imports are lazy, so that help is quick."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpbench.arguments import OneLineParser, folder, place, png, whole
from dpbench.training.threads import wait_briefly

_EXAMPLES = """\
examples:
  dpbench train                                     real digits, MNIST CNN, DP-SGD, on the CPU
  dpbench train data=mnist strategy.noise_multiplier=1.1 trainer.max_steps=8000
  dpbench train strategy.noise_multiplier=null strategy.target_epsilon=3
  dpbench train strategy=none                       the baseline without privacy
  dpbench train -m optimizer.lr=0.1,0.2 seed=0,1    a sweep (Hydra multirun)
  dpbench train --cfg job                           print the composed configuration
  dpbench train hydra.run.dir=runs/demo             a run in a folder of your choice
  dpbench resume runs/demo                          continue it after Ctrl-C, a crash or a full disk
  dpbench account runs/demo --accountant pld --delta 1e-6
  dpbench calibrate --epsilon 3 --delta 1e-5 --sample-rate 0.004 --epochs 60
  dpbench reproduce claims                          every epsilon that the papers print, recomputed
  dpbench table runs multirun                       finished runs side by side
  dpbench sample RUN --n 1000 --out runs/synthetic  images of a GAN (dpbench train experiment=digits_gan)
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


_COMMANDS = (
    "train", "priors", "resume", "account", "calibrate", "reproduce", "compare", "table", "sample", "evaluate",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: Without the program's name; None takes them from the process.

    Returns:
        Exit status: 0, 1 for an error that a user can mend, 2 for wrong usage, 3 for a damaged ledger, 130 for
        Ctrl-C, 143 for SIGTERM.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # where Greek letters cannot be printed
    logging.getLogger("absl").setLevel(logging.ERROR)  # dp_accounting names each order that gives no bound
    wait_briefly()
    args = list(sys.argv[1:] if arguments is None else arguments)
    if args[:1] == ["train"]:
        return _guarded(lambda: _train(args[1:]))
    if args[:1] == ["priors"]:
        return _guarded(lambda: _priors(args[1:]))
    parser = _parser()
    if args and not args[0].startswith("-") and args[0] not in _COMMANDS:
        near = difflib.get_close_matches(args[0], _COMMANDS, 1)
        parser.error(f"there is no command {args[0]}." + (f" Did you mean {near[0]}?" if near else ""))
    options, rest = parser.parse_known_args(args or ["--help"])
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # words after options, which argparse does not take by itself
        options.words = [*options.words, *rest]
    return _guarded(lambda: int(options.run(options)))


_ACCOUNT_EPILOG = """\
accountants (--accountant NAME, several with commas, or all):
  rdp             Renyi DP, today's conversion (default)            Poisson, fixed size
  pld             privacy loss distributions, mostly the tightest   Poisson
  rdp-classic     the papers' conversion, RDP + log(1/delta)/(a-1)  Poisson, fixed size
  rdp-continuous  the best real order                               Poisson, fixed size
  rdp-analytical  Theorem 5 of pyvacy_2019: a looser curve          fixed size
  gdp             central limit theorem: approximation, no bound    Poisson, fixed size
Poisson lots are accounted for with one record added or removed, lots of a fixed size with one replaced.

examples:
  dpbench train hydra.run.dir=runs/demo             a run to ask about
  dpbench account runs/demo --accountant all --plot epsilon.png
  dpbench account runs/demo --delta 1e-6 --accountant pld --json
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench account runs/sweep                        each run, and all of them together
  dpbench account runs/sweep --selection geometric --mean-trials 2
"""

_CALIBRATE_EPILOG = """\
Leave out one of --noise-multiplier, --sample-rate (or --batch-size), --steps (or --epochs), --epsilon, --delta.
With --ledger or --like, noise, rate and delta that are not given come from that run.

examples:
  dpbench calibrate --noise-multiplier 1.1 --sample-rate 0.0042667 --steps 14062 --delta 1e-5 --accountant rdp-classic
  dpbench calibrate --epsilon 3 --delta 1e-5 --population 60000 --batch-size 256 --epochs 60 --accountant pld
  dpbench calibrate --epsilon 5 --delta 2.5e-7 --sampling fixed --population 1000000 --batch-size 2231 --steps 4000
  dpbench calibrate --epsilon 3 --delta 1e-5 --sample-rate 0.004 --steps 8000 --groups 10 --statistic counts=20
  dpbench train hydra.run.dir=runs/demo
  dpbench calibrate --ledger runs/demo --epsilon 20             how many more steps
  dpbench calibrate --like runs/demo --epsilon 2 --steps 500    the noise of another run with such queries
"""

_RESUME_EPILOG = """\
examples:
  dpbench train trainer.max_steps=5000 hydra.run.dir=runs/long     stop it with Ctrl-C
  dpbench resume runs/long
"""

_COMPARE_EPILOG = """\
examples:
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench compare runs/sweep                        every run of a sweep
  dpbench compare runs/demo multirun --plot curves.png
"""

_REPRODUCE_EPILOG = """\
Runs are kept (--runs) by the hash of their configuration and code: called again, the command runs only what is missing,
continues what was interrupted, and tries again what failed.

examples:
  dpbench reproduce list                                      what there is
  dpbench reproduce claims                                    every printed epsilon, recomputed (one minute)
  dpbench reproduce gradient_compression/table1 --status      what is finished, and the table so far
  dpbench reproduce gradient_compression/table1 rows=sigma_1.1 seeds=1
  dpbench reproduce gradient_compression/table1 launcher=joblib hydra.launcher.n_jobs=2    two runs at a time
"""


def _account_parser(commands: Any) -> None:
    account = commands.add_parser(
        "account",
        help="epsilon of runs and sweeps, from their ledgers",
        epilog=_ACCOUNT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    account.add_argument("paths", type=place, nargs="+", metavar="RUN", help="folder of a run or a sweep, or a ledger")
    account.add_argument("--delta", type=float, help="delta (default: the run's own)")
    account.add_argument("--accountant", default="rdp", metavar="NAME", help="see below (default: rdp)")
    nominal = "where an accountant does not cover how lots were drawn, compute what other lots would cost, and say so"
    account.add_argument("--nominal", action="store_true", help=nominal)
    shapes = "only the best run is published: number of trials geometric, logarithmic, poisson, or a shape"
    account.add_argument("--selection", metavar="DISTRIBUTION", help=shapes)
    account.add_argument("--mean-trials", type=float, metavar="MEAN", help="mean of that distribution")
    account.add_argument("--plot", type=png, metavar="PNG", help="draw epsilon against steps and against the order")
    account.add_argument("--json", action="store_true", help="print JSON")
    account.set_defaults(run=_account)


def _calibrate_parser(commands: Any) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="the noise, rate, steps, epsilon or delta that the others leave",
        epilog=_CALIBRATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = calibrate.add_argument
    add(
        "--noise-multiplier",
        type=float,
        metavar="Z",
        help="noise over the sensitivity of the sum",
    )
    add("--sample-rate", type=float, metavar="Q", help="probability of a record to be in a lot")
    add("--batch-size", type=float, metavar="B", help="(expected) records in a lot, of --population")
    add("--population", type=whole, metavar="N", help="records that can be drawn")
    add("--steps", type=whole, metavar="T", help="lots (with --ledger: further ones)")
    add("--epochs", type=float, metavar="E", help="the same in passes over the data")
    add("--epsilon", type=float, help="target")
    add("--delta", type=float, help="delta")
    add("--sampling", choices=["poisson", "fixed", "fixed_size"], help="how lots are drawn (default: poisson)")
    add("--microbatch-size", type=whole, metavar="M", help="examples of a microbatch: doubles the sensitivity")
    add("--accountant", default="rdp", metavar="NAME", help="see dpbench account --help (default: rdp)")
    source = calibrate.add_mutually_exclusive_group()
    source.add_argument("--ledger", type=place, metavar="RUN", help="go on with this run: what it spent counts")
    source.add_argument("--like", type=place, metavar="RUN", help="a new run with the queries of this one")
    add("--groups", type=whole, default=1, metavar="G", help="vector groups that share the gradient's noise")
    beside = "noise multiplier of a count, norm or metric released beside the gradient (may be repeated)"
    add("--statistic", action="append", default=[], metavar="NAME=Z", help=beside)
    add("--json", action="store_true", help="print JSON")
    calibrate.set_defaults(run=_calibrate)


def _reproduce_parser(commands: Any) -> None:
    reproduce = commands.add_parser(
        "reproduce",
        help="run a paper's table, or recompute its claims",
        usage="dpbench reproduce TABLE [seeds=N] [rows=NAME,...] [columns=NAME,...] [trainer=NAME] [launcher=NAME] "
        "[--status]",
        epilog=_REPRODUCE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = reproduce.add_argument
    add("table", metavar="TABLE", help="list, claims, a name from the list, or a definition of your own (FILE.yaml)")
    words = "seeds=3 (or seeds=0,4), rows=, columns=, trainer=, launcher="
    add("words", nargs="*", default=[], metavar="KEY=VALUE", help=words)
    add("--status", action="store_true", help="run nothing; show what is finished")
    add("--replace", action="store_true", help="overwrite results that other code has made")
    add("--out", type=folder, default=Path("results"), metavar="FOLDER", help="for tables (default: results)")
    runs = Path("runs") / "tables"
    add("--runs", type=folder, default=runs, metavar="FOLDER", help="for the runs themselves (default: runs/tables)")
    reproduce.set_defaults(run=_reproduce)


def _parser() -> argparse.ArgumentParser:
    from dpbench import __version__

    raw = argparse.RawDescriptionHelpFormatter
    description = "Differentially private deep learning with PyTorch Lightning: train, compare, and trust the epsilon."
    parser = OneLineParser("dpbench", description=description, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"dpbench {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("train", help="train and test a model (Hydra overrides)", add_help=False)
    commands.add_parser("priors", help="priors of the error correction, from public data", add_help=False)
    resume = commands.add_parser(
        "resume",
        help="continue an interrupted run",
        usage="dpbench resume RUN [KEY=VALUE ...]",
        epilog=_RESUME_EPILOG,
        formatter_class=raw,
    )
    resume.add_argument("folder", type=place, metavar="RUN", help="the run's folder")
    resume.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="such as trainer.max_steps=2000")
    resume.set_defaults(run=_resume)
    _account_parser(commands)
    _calibrate_parser(commands)
    _reproduce_parser(commands)
    _compare_parser(commands)
    table = commands.add_parser(
        "table",
        help="finished runs side by side",
        epilog="examples:\n  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep\n  dpbench table runs/sweep",
        formatter_class=raw,
    )
    table.add_argument("folders", type=place, nargs="+", metavar="FOLDER", help="folders of runs or sweeps")
    table.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")
    table.set_defaults(run=_table)
    from dpbench.synthesis import command  # light: imports PyTorch when it runs

    command.add_parsers(commands)
    return parser


def _compare_parser(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="how runs differ: settings, metrics, curves",
        epilog=_COMPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "folder of a run, a sweep or a table's results, or wandb:ENTITY/PROJECT[:GROUP]"
    compare.add_argument("sources", nargs="+", metavar="WHAT", help=what)
    compare.add_argument("--plot", type=png, default=Path("compare.png"), metavar="PNG", help="default: compare.png")
    compare.set_defaults(run=_compare)


def _compare(options: Any) -> int:
    from dpbench.results.compare import compare, draw, load

    runs = []
    for source in options.sources:
        if source.startswith("wandb:"):
            from dpbench.training.wandb_log import recorded

            runs += recorded(source.removeprefix("wandb:"))
        else:
            runs += load(source)
    print(compare(runs))
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    print("\ncurves:", draw(runs, options.plot) or "none of these logged any")
    return 0


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
    from dpbench.results.account import Question, account, accountant_names, selection_named

    names = accountant_names(options.accountant)
    selection = selection_named(options.selection, options.mean_trials)
    answer = account(options.paths, Question(names, options.delta, options.nominal, selection))
    print(answer.to_json() if options.json else answer.text)
    if options.plot is not None:
        from dpbench.results.account_plot import plot_epsilon

        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot_epsilon(options.plot, answer.ledgers, answer.facts["delta"], names, options.nominal)
    for name, damage in answer.damage.items():
        print(f"dpbench: error: {name}: {damage}; the epsilon of what is there is no guarantee.", file=sys.stderr)
    return 3 if answer.damage else 0


def _calibrate(options: Any) -> int:
    from dpbench.results.calibrate import calibrate, request

    options.sampling = "fixed_size" if options.sampling == "fixed" else options.sampling
    setting, pattern = request(options)
    print(calibrate(setting, pattern, options.accountant, options.json))
    return 0


def _reproduce(options: Any) -> int:
    from dpbench.errors import ConfigurationError
    from dpbench.reproduce.command import WITHOUT_RUNS, listing, reproduce_table, request

    if options.table == "list":
        if options.words or options.status or options.replace:
            raise ConfigurationError("list takes no further words: dpbench reproduce list.")
        print(listing())
        return 0
    if options.table in WITHOUT_RUNS:
        if options.words or options.status or options.replace:
            raise ConfigurationError(f"{options.table} takes no runs: only --out goes with it.")
        folder = options.out / options.table.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)  # find out now, not after a minute
        print(WITHOUT_RUNS[options.table].make()(folder))
        return 0
    asked = request(options.words)
    text, good = reproduce_table(options.table, asked, options.out, options.runs, options.status, options.replace)
    print(text)
    return 0 if good else 1


def _table(options: Any) -> int:
    from dpbench.results.table import collect, markdown

    table = collect(options.folders)
    print(table.to_csv(index=False) if options.csv else markdown(table))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
