"""The command `dpbench pretrain`, an entry point of `dpbench.commands`."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Answer, Commands, add_command, file, integer
from dpbench.errors import ConfigurationError

_EPILOG = """\
The images are made up (dead leaves, 1/f noise, random shaders): no data set is read, and no privacy is spent. Then:
dpbench train data=cifar10 data.features=random_prior data.prior=FILE

examples:
  dpbench pretrain --out prior.pt
  dpbench pretrain --out long.pt --device cuda --steps 40000
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "pretrain",
        "Train a feature extractor on images of random processes.",
        _pretrain,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--out", type=file, required=True, metavar="FILE", help="file for the weights")
    add("--device", default="cpu", help="torch device: cpu (default) or cuda")
    add("--steps", type=integer, default=2500, metavar="N", help="training steps (default: 2500)")
    add("--seed", type=integer, default=0, help="seed of images, views and initial weights (default: 0)")


def _pretrain(options: argparse.Namespace) -> Answer:
    from dpbench.capabilities.prior.extractor import Settings
    from dpbench.capabilities.prior.pretraining import pretrain

    if options.steps < 1:
        raise ConfigurationError(f"--steps must be at least 1, not {options.steps}.")
    _, summary = pretrain(options.out, Settings(steps=options.steps, seed=options.seed), options.device)
    return Answer(summary)
