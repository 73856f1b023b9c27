"""`dpbench calibrate`: the noise, rate, steps, epsilon or delta that the others leave."""

from __future__ import annotations

import argparse
from dataclasses import fields

from dpbench.cli.arguments import Commands, add_command, place, whole

_EPILOG = """\
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


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands, "calibrate", "the noise, rate, steps, epsilon or delta that the others leave", _EPILOG
    )
    add = parser.add_argument
    add("--noise-multiplier", type=float, metavar="Z", help="noise over the sensitivity of the sum")
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
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--ledger", type=place, metavar="RUN", help="go on with this run: what it spent counts")
    source.add_argument("--like", type=place, metavar="RUN", help="a new run with the queries of this one")
    add("--groups", type=whole, default=1, metavar="G", help="vector groups that share the gradient's noise")
    beside = "noise multiplier of a count, norm or metric released beside the gradient (may be repeated)"
    add("--statistic", action="append", default=[], metavar="NAME=Z", help=beside)
    add("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what was solved for, and its neighborhood."""
    from dpbench.reports.calibrate import TrainingValues, calibrate, request

    setting, pattern = request(
        TrainingValues(**{field.name: getattr(options, field.name) for field in fields(TrainingValues)}),
        groups=options.groups,
        statistics=options.statistic,
        microbatch_size=options.microbatch_size,
        ledger=options.ledger,
        like=options.like,
    )
    print(calibrate(setting, pattern, options.accountant, options.json))
    return 0
