"""The command, an entry point of `dpbench.commands`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from dpbench.cli.arguments import Answer, Commands, add_command, add_overrides
from dpbench.cli.experiments import add_output
from dpbench.errors import ConfigurationError

_EPILOG = """\
Give the settings of one private training (dpbench train), without its noise. The steps:

  0 batch    data.expected_batch_size: the largest that your time allows; scale optimizer.lr with it
  1 power    training without privacy on noise of the data's size and shape recalls more than 90 % of its random labels
  2 noise    for each z the same with privacy: epsilon, recall of training and of fresh labels, an audit by labels
  3 chosen   the smallest z at which training labels are recalled at most 10 points better than fresh ones, with
             95 % confidence, also at all larger z
  4 data     that z on the actual data: constant and adaptive bounds, no privacy; epsilon claimed, sound, audited

Passing is not a guarantee; epsilon is. Noise is public: choosing on it costs no privacy. Runs are stored (--runs) by
the hash of their configuration and code: repeating the command runs only what is missing, and continues what was
interrupted.

exit status: 0 done, 1 the power check fails, no z passes, or a run has failed.

examples:
  dpbench workflow model=mlp data=mnist data.train_size=2000 --noise-multipliers 1,2,3,4 --margin 10
  dpbench workflow model=small_alexnet data=cifar10 launcher=joblib hydra.launcher.n_jobs=2 --status
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "workflow",
        "Choose σ on random-label data, then train.",
        _workflow,
        epilog=_EPILOG,
        usage="dpbench workflow model=NAME data=NAME [KEY=VALUE ...] [launcher=NAME] [--noise-multipliers Z,Z] "
        "[--margin POINTS] [--status]",
    )
    add = parser.add_argument
    add_overrides(parser, "settings of the private training, and launcher=")
    add(
        "--noise-multipliers",
        type=_noise_multipliers,
        metavar="Z,Z",
        help="to try (default: seven in geometric progression, for epsilon from 32 to 0.5)",
    )
    add(
        "--margin",
        type=float,
        default=10.0,
        metavar="POINTS",
        help="how many points better than fresh labels training labels may be recalled (default: 10)",
    )
    add_output(parser, Path("runs") / "workflow")


def _noise_multipliers(word: str) -> list[float]:
    """Read positive numbers such as 4,1,2; in increasing order."""
    try:
        numbers = sorted({float(f"{float(number):g}") for number in word.split(",")})
    except ValueError:
        numbers = [math.nan]
    if not all(0 < number < math.inf for number in numbers):
        raise argparse.ArgumentTypeError(f"must be positive noise multipliers, such as 1,2,4, not {word!r}")
    return numbers


def _workflow(options: argparse.Namespace) -> Answer:
    """Carry out the workflow; status 1 if it stops before its end."""
    from dpbench.capabilities.workflow.run import run_workflow

    for name in ("model", "data"):
        if not any(word.startswith(f"{name}=") for word in options.words):
            raise ConfigurationError(f"name the {name}: dpbench workflow model=mlp data=mnist, say.")
    if not 0 < options.margin < 100:
        raise ConfigurationError(f"--margin must be between 0 and 100 points, not {options.margin:g}.")
    launcher = [word for word in options.words if word.startswith(("launcher=", "hydra.launcher."))]
    passed = run_workflow(
        [word for word in options.words if word not in launcher],
        launcher,
        noise_multipliers=options.noise_multipliers,
        margin=options.margin / 100,
        out=options.out,
        runs=options.runs,
        only_status=options.status,
    )
    return Answer(status=0 if passed else 1)
