"""`dpbench priors`: priors of the error correction, from public data."""

from __future__ import annotations

import argparse
from tempfile import TemporaryDirectory

from dpbench.cli.arguments import Commands, add_command

_HELP = """\
usage: dpbench priors GROUP=NAME ... [KEY=VALUE ...]

Train without noise on PUBLIC data, and estimate how often gradients fall under each hypothesis of the error correction.
Takes what `dpbench train` takes, with strategy=discretized (or strategy=dpsgd and a correction_threshold).

example:
  dpbench priors data=fashion_mnist strategy=discretized trainer.max_steps=200
"""


def add_parser(commands: Commands) -> None:
    """List the command; Hydra reads its words."""
    add_command(commands, "priors", "priors of the error correction, from public data", add_help=False)


def run(options: argparse.Namespace) -> int:
    """Train on public data, or show help."""
    if not options.words or "-h" in options.words or "--help" in options.words:
        print(_HELP)
        return 0
    from dpbench.run.jobs import launch
    from dpbench.run.priors import priors_job

    with TemporaryDirectory() as folder:  # nothing is kept
        words = [*options.words, f"hydra.run.dir={folder}/run", "hydra/job_logging=none"]
        return launch(words, job=priors_job)
