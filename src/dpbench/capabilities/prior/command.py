"""The command `dpbench pretrain`, an entry point of `dpbench.commands`."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Answer, Commands, add_command, file

_EPILOG = """\
The images are made up (dead leaves, 1/f noise, random shaders): no data set is read, and no privacy is spent. Then:
dpbench train data=cifar10 data.features=random_prior data.prior=FILE

examples:
  dpbench pretrain --out prior.pt
  dpbench pretrain --out large.pt --device cuda --width 96 --batch-size 1024 --steps 40000
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
    add("--out", type=file, required=True, metavar="FILE", help="file of the weights")
    add("--device", default="cpu", help="of torch: cpu (default), cuda")
    add("--steps", type=int, metavar="N", help="steps of the training (default: 2500)")
    add("--batch-size", type=int, metavar="N", help="images of a step, new ones each time (default: 256)")
    add("--width", type=int, metavar="N", help="channels of the first layer, an eighth of the last (default: 32)")
    add("--image-size", type=int, metavar="PIXELS", help="side of the images (default: 32)")
    add("--learning-rate", type=float, metavar="RATE", help="of AdamW (default: 0.0015)")
    add("--seed", type=int, help="of images, views and first weights (default: 0)")


def _pretrain(options: argparse.Namespace) -> Answer:
    from dpbench.capabilities.prior.extractor import Settings
    from dpbench.capabilities.prior.pretraining import pretrain

    names = ("steps", "batch_size", "width", "image_size", "learning_rate", "seed")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    _, summary = pretrain(options.out, Settings(**given), options.device)
    return Answer(summary)
