"""Commands about epsilon: `dpbench account` and `dpbench calibrate`."""

from __future__ import annotations

import argparse
import sys

from dpbench.cli.arguments import (
    Answer,
    Commands,
    add_command,
    add_json,
    add_runs,
    integer,
    place,
)

_ACCOUNT = """\
--accountant NAME[,NAME...] or all: docs/epsilon.md lists accountants and the sampling that each covers.
Poisson sampling is accounted for with one record added or removed, batches of a fixed size with one replaced.

examples:
  dpbench account runs/demo --accountant all
  dpbench account runs/demo --delta 1e-6 --accountant pld --json
  dpbench account runs/sweep                        each run, and all of them together
  dpbench account runs/sweep --selection geometric --mean-trials 2
  dpbench account runs/demo --population 1000000 --batch-size 5000     planning: nominal, no guarantee
"""

_CALIBRATE = """\
Leave out one of --noise-multiplier, --sample-rate (or --batch-size), --steps (or --epochs), --epsilon, --delta.
--advantage or --tpr in place of --epsilon state the budget as what any membership test may reach.
With --continue-from, noise, rate and delta default to those of that run.

examples:
  dpbench calibrate --epsilon 3 --delta 1e-5 --population 60000 --batch-size 256 --epochs 60 --accountant pld
  dpbench calibrate --noise-multiplier 1.1 --sample-rate 0.0042667 --steps 14062 --delta 1e-5
  dpbench calibrate --advantage 0.1 --population 60000 --batch-size 256 --epochs 60
  dpbench calibrate --continue-from runs/demo --epsilon 20      how many more steps
"""


def add_parsers(commands: Commands) -> None:
    """Add the commands."""
    _add_account(commands)
    _add_calibrate(commands)


def _add_account(commands: Commands) -> None:
    summary = "Recompute epsilon of runs and sweeps from their ledgers."
    parser = add_command(commands, "account", summary, _account, epilog=_ACCOUNT)
    add = parser.add_argument
    add_runs(parser, "folder of a run or a sweep, or a ledger")
    add("--delta", type=float, help="delta (default: the run's own)")
    add("--accountant", default="rdp", metavar="NAME", help="rdp (default), pld or others, see below")
    add(
        "--nominal",
        action="store_true",
        help="if an accountant does not cover the sampling, report a nominal epsilon for sampling that it covers",
    )
    add(
        "--population",
        type=integer,
        metavar="N",
        help="nominal: cost of the runs with this number of records (users)",
    )
    add(
        "--batch-size",
        type=float,
        metavar="B",
        help="with --population: expected batch size, with noise scaled in proportion (default: as in the runs)",
    )
    add(
        "--selection",
        metavar="DISTRIBUTION",
        help="only the best run is published; number of trials: geometric, logarithmic, poisson, or a shape",
    )
    add("--mean-trials", type=float, metavar="MEAN", help="mean of that distribution")
    add(
        "--releases",
        type=integer,
        metavar="N",
        help="count only the first N releases of each run",
    )
    add_json(parser)


def _account(options: argparse.Namespace) -> Answer:
    """Account for ledgers; status 3 if one is damaged."""
    from dpbench.harness.reports.account import AccountingRequest, account

    request = AccountingRequest(**{name: getattr(options, name) for name in AccountingRequest.__dataclass_fields__})
    report = account(options.sources, request)
    for doubt in report.doubts:
        print(f"dpbench: warning: {doubt}", file=sys.stderr)
    for name, damage in report.damage.items():
        print(f"dpbench: error: {name}: {damage}; the epsilon of what is there is not a guarantee.", file=sys.stderr)
    return Answer(report.text, report.facts, 3 if report.damage else 0)


def _add_calibrate(commands: Commands) -> None:
    summary = "Solve for whichever of noise, sampling rate, steps, epsilon, delta is left out."
    parser = add_command(commands, "calibrate", summary, _calibrate, epilog=_CALIBRATE)
    add = parser.add_argument
    add("--noise-multiplier", type=float, metavar="Z", help="noise over the sensitivity of the sum")
    add("--sample-rate", type=float, metavar="Q", help="probability that a record is in a batch")
    add("--batch-size", type=float, metavar="B", help="(expected) records in a batch, of --population")
    add("--population", type=integer, metavar="N", help="number of records")
    add("--steps", type=integer, metavar="T", help="steps (with --continue-from: additional ones)")
    add("--epochs", type=float, metavar="E", help="the same in epochs, as trainer.max_epochs counts them")
    add("--epsilon", type=float, help="target")
    add("--advantage", type=float, metavar="A", help="target: largest advantage (TPR - FPR) of a membership test")
    add("--tpr", metavar="TPR@FPR", help="target: its largest true positive rate at a false positive rate: 0.05@0.01")
    add("--delta", type=float, help="delta")
    add("--sampling", metavar="NAME", help="how batches are drawn: poisson (default) or fixed_size")
    add("--bands", type=integer, metavar="B", help="noise correlated over B steps, on cyclic_poisson batches")
    add("--microbatch-size", type=integer, metavar="M", help="examples per microbatch; doubles the sensitivity")
    add("--accountant", default="rdp", metavar="NAME", help="see dpbench account --help (default: rdp)")
    add("--continue-from", type=place, metavar="RUN", help="continue this run, counting what it has spent")
    add_json(parser)


def _calibrate(options: argparse.Namespace) -> Answer:
    from dpbench.harness.reports.calibrate import calibrate

    facts, text = calibrate(vars(options))
    for doubt in facts["doubts"]:
        print(f"dpbench: warning: {doubt}", file=sys.stderr)
    return Answer(text, facts)
