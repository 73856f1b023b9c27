"""`dpbench sample`: a synthetic data set from a trained GAN."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Commands, add_command, add_trust, place

_EPILOG = """\
examples:
  dpbench train experiment=digits_gan hydra.run.dir=runs/gan
  dpbench sample runs/gan --n 1000 --out runs/synthetic
  dpbench sample runs/gan --n 100 --out runs/pictures --format folder
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "sample", "a synthetic data set from a trained GAN", _EPILOG)
    add = parser.add_argument
    add("folder", type=place, metavar="RUN", help="folder of a run with module=gan")
    add("--n", type=int, required=True, metavar="N", help="number of images")
    add("--out", type=place, required=True, metavar="FOLDER", help="where images and their card go")
    add("--seed", type=int, default=0, help="of the noise (default: 0)")
    forms = "npz (default), or a folder of PNGs for each class"
    add("--format", choices=["npz", "folder"], default="npz", help=forms)
    add("--force", action="store_true", help="replace the synthetic data set in FOLDER")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Write the data set and print where it is."""
    from dpbench.synthesis.sample import sample

    text = sample(
        options.folder,
        options.n,
        options.out,
        options.seed,
        options.format,
        options.force,
        options.trust,
    )
    print(text)
    return 0
