"""`dpbench sample` and `dpbench evaluate` on the command line."""

from __future__ import annotations

import argparse
from typing import Any

from dpbench.arguments import place

_SAMPLE_EPILOG = """\
examples:
  dpbench train experiment=digits_gan hydra.run.dir=runs/gan
  dpbench sample runs/gan --n 1000 --out runs/synthetic
  dpbench sample runs/gan --n 100 --out runs/pictures --format folder
"""

_EVALUATE_EPILOG = """\
The last checkpoint is judged, with real test data; nothing is chosen by it.

examples:
  dpbench train experiment=digits_gan hydra.run.dir=runs/gan
  dpbench evaluate runs/gan --n 1000
"""


def add_parsers(commands: Any) -> None:
    """Add both commands."""
    raw = argparse.RawDescriptionHelpFormatter
    sample = commands.add_parser(
        "sample", help="a synthetic data set from a trained GAN", epilog=_SAMPLE_EPILOG, formatter_class=raw
    )
    sample.add_argument("folder", type=place, metavar="RUN", help="folder of a run with module=gan")
    sample.add_argument("--n", type=int, required=True, metavar="N", help="number of images")
    sample.add_argument("--out", type=place, required=True, metavar="FOLDER", help="where images and their card go")
    sample.add_argument("--seed", type=int, default=0, help="of the noise (default: 0)")
    forms = "npz (default), or a folder of PNGs for each class"
    sample.add_argument("--format", choices=["npz", "folder"], default="npz", help=forms)
    sample.add_argument("--force", action="store_true", help="replace the synthetic data set in FOLDER")
    sample.set_defaults(run=_sample)
    evaluate = commands.add_parser(
        "evaluate", help="what a GAN's images are good for", epilog=_EVALUATE_EPILOG, formatter_class=raw
    )
    evaluate.add_argument("folder", type=place, metavar="RUN", help="folder of a run with module=gan")
    evaluate.add_argument("--n", type=int, default=60_000, metavar="N", help="images to sample (default: 60000)")
    evaluate.add_argument("--seed", type=int, default=0, help="of the noise (default: 0)")
    networks = "of the Fréchet distance: digits (default) or inception"
    evaluate.add_argument("--features", default="digits", metavar="NETWORK", help=networks)
    judged = "real data to judge on: test (default), or val: records that the run held out (data.val_size)"
    evaluate.add_argument("--on", choices=["test", "val"], default="test", help=judged)
    evaluate.set_defaults(run=_evaluate)


def _sample(options: Any) -> int:
    from dpbench.synthesis.sample import sample

    print(sample(options.folder, options.n, options.out, options.seed, options.format, options.force))
    return 0


def _evaluate(options: Any) -> int:
    from dpbench.synthesis.evaluate import evaluate, summary

    print(summary(evaluate(options.folder, options.n, options.seed, options.features, options.on)))
    return 0
