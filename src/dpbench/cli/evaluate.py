"""`dpbench evaluate`: what a GAN's images are good for."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Commands, add_command, add_trust, place

_EPILOG = """\
The last checkpoint is judged, with real test data; nothing is chosen by it.

examples:
  dpbench train experiment=digits_gan hydra.run.dir=runs/gan
  dpbench evaluate runs/gan --n 1000
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "evaluate", "what a GAN's images are good for", _EPILOG)
    add = parser.add_argument
    add("folder", type=place, metavar="RUN", help="folder of a run with module=gan")
    add("--n", type=int, default=60_000, metavar="N", help="images to sample (default: 60000)")
    add("--seed", type=int, default=0, help="of the noise (default: 0)")
    networks = "of the Fréchet distance: digits (default) or inception"
    add("--features", default="digits", metavar="NETWORK", help=networks)
    judged = "real data to judge on: test (default), or val: records that the run held out (data.val_size)"
    add("--on", choices=["test", "val"], default="test", help=judged)
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Judge the images and print the result."""
    from dpbench.synthesis.evaluate import evaluate, summary

    results = evaluate(
        options.folder,
        options.n,
        options.seed,
        options.features,
        options.on,
        options.trust,
    )
    print(summary(results))
    return 0
