"""The command, an entry point of `dpbench.commands`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from dpbench.cli.arguments import Answer, Commands, add_command, add_config_dir, add_overrides, folder, own_code
from dpbench.errors import ConfigurationError

_SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
_EPILOG = """\
Choosing the best of several private runs costs privacy, too: the epsilon of one run does not cover it. Here a random
number of trials is made, each with settings drawn from lists, and only the one with the best private score comes out.
Epsilon covers the choice (Papernot & Steinke 2022). The number of trials stays secret: no other trial, log or time is
kept. Options with several values are tuned: lists of any option, optimizer.lr=0.1,0.3,1, and for optimizer. and
schedule. options intervals, 'optimizer.lr=interval(0.1,1)' or, by logarithm, 'optimizer.lr=tag(log,interval(0.1,1))'.

Each trial is scored on private records that are held out by a hash (data.split=hash with data.val_size or val_users),
with noise, or on public ones (--validation public).

examples:
  dpbench tune experiment=tune/digits
  dpbench tune model=mnist_cnn data=mnist data.split=hash data.val_size=5000 optimizer.lr=0.1,0.3,1 \\
    data.expected_batch_size=256,1024 --epsilon 3 --delta 1e-5 --out tuned
  dpbench account tuned --accountant pld       # recomputes epsilon from the statement in tuned/ledger.jsonl
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "tune",
        "Train the best of several settings, within one ε.",
        _tune,
        epilog=_EPILOG,
        usage="dpbench tune KEY=VALUE,VALUE [KEY=VALUE ...] [--epsilon E] [--delta D] [--trials MEAN] [--out FOLDER] "
        "[--config-dir FOLDER]",
    )
    add = parser.add_argument
    add_overrides(parser, "settings of a trial, as for dpbench train; those with several values are tuned")
    add("--epsilon", type=float, default=3.0, metavar="E", help="total ε, choosing included (default: 3)")
    add("--delta", type=float, default=1e-5, metavar="D", help="δ (default: 1e-5)")
    add(
        "--accountant",
        choices=("pld", "rdp"),
        default="pld",
        help="pld (default): less noise for ε; rdp: quicker, and composes with other runs on the data",
    )
    add("--trials", type=float, default=10.0, metavar="MEAN", help="mean number of trials (default: 10)")
    add(
        "--selection",
        default="poisson",
        metavar="DISTRIBUTION",
        help="distribution of the number: poisson (default), geometric, logarithmic, or a negative binomial shape",
    )
    add("--score", default="accuracy", metavar="NAME", help="metric of a record, or loss (default: accuracy)")
    add("--score-bound", type=float, metavar="B", help="loss at which the score is 0, with --score loss")
    add(
        "--validation",
        choices=("private", "public"),
        default="private",
        help="records of the score; public: no noise, and no ε for them (default: private)",
    )
    add(
        "--out",
        type=folder,
        default=Path("tuned"),
        metavar="FOLDER",
        help="folder of the result, in which a stopped tuning goes on (default: tuned)",
    )
    add_config_dir(parser)


def _tune(options: argparse.Namespace) -> Answer:
    from dpbench.capabilities.tune.planning import Request
    from dpbench.capabilities.tune.tuning import tune

    try:
        shape = _SHAPES[options.selection] if options.selection in _SHAPES else float(options.selection)
    except ValueError:
        raise ConfigurationError(
            f"--selection must be {', '.join(_SHAPES)} or a number, not {options.selection!r}."
        ) from None
    request = Request(
        words=tuple(options.words),
        epsilon=options.epsilon,
        delta=options.delta,
        accountant=options.accountant,
        trials=options.trials,
        shape=None if math.isinf(shape) else shape,
        score=options.score,
        score_bound=options.score_bound,
        is_public=options.validation == "public",
        config_dir=None if options.config_dir is None else str(options.config_dir.resolve()),
    )
    with own_code(options, options.out):
        return Answer(tune(request, options.out))
