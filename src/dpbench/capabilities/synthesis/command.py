"""The commands `dpbench sample` and `dpbench evaluate`, entry points of `dpbench.commands`."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import (
    Answer,
    Commands,
    add_command,
    add_config_dir,
    add_json,
    add_trust,
    own_code,
    place,
)

_SAMPLE = """\
examples:
  dpbench train experiment=digits_gan hydra.run.dir=runs/gan
  dpbench sample runs/gan --num-samples 1000 --out runs/synthetic
"""

_EVALUATE = """\
The last checkpoint is evaluated on real test data; nothing is chosen by it.

examples:
  dpbench train experiment=digits_gan hydra.run.dir=runs/gan
  dpbench evaluate runs/gan --num-samples 1000
"""


def add_sample(commands: Commands) -> None:
    """Add `dpbench sample`."""
    parser = add_command(commands, "sample", "Sample a synthetic data set from a trained GAN.", _sample, epilog=_SAMPLE)
    add = parser.add_argument
    add("folder", type=place, metavar="RUN", help="folder of a run with module=gan")
    add("--num-samples", type=int, required=True, metavar="N", help="number of images")
    add("--out", type=place, required=True, metavar="FOLDER", help="folder for the images and their card")
    add("--seed", type=int, default=0, help="seed of the generator's noise (default: 0)")
    add_config_dir(parser)
    add_trust(parser)


def _sample(options: argparse.Namespace) -> Answer:
    from dpbench.capabilities.synthesis.sample import sample

    with own_code(options, options.folder):
        text = sample(
            options.folder,
            options.num_samples,
            options.out,
            options.seed,
            options.trust,
        )
    return Answer(text)


def add_evaluate(commands: Commands) -> None:
    """Add `dpbench evaluate`."""
    summary = "Evaluate a GAN's synthetic data (utility, fidelity, memorization)."
    parser = add_command(commands, "evaluate", summary, _evaluate, epilog=_EVALUATE)
    add = parser.add_argument
    add("folder", type=place, metavar="RUN", help="folder of a run with module=gan")
    add("--num-samples", type=int, default=60_000, metavar="N", help="images to sample (default: 60000)")
    add("--seed", type=int, default=0, help="seed of the generator's noise (default: 0)")
    add(
        "--split",
        choices=["test", "val"],
        default="test",
        help="real data to evaluate on: test (default), or val: records that the run held out (data.val_size)",
    )
    add_json(parser)
    add_config_dir(parser)
    add_trust(parser)


def _evaluate(options: argparse.Namespace) -> Answer:
    from dpbench.capabilities.synthesis.evaluate import evaluate, summary

    with own_code(options, options.folder):
        figures = evaluate(
            options.folder,
            options.num_samples,
            options.seed,
            options.split,
            options.trust,
        )
    return Answer(summary(figures), figures)
