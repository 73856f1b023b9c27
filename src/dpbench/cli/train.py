"""`dpbench train`: one run, or a sweep, composed by Hydra."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dpbench.cli.arguments import Commands, add_command, add_overrides

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dpbench.harness.runs.sweep import Sweep

EXAMPLES = """\
examples:
  dpbench train                                     real digits, MNIST CNN, DP-SGD, on the CPU
  dpbench train data=mnist strategy.noise_multiplier=1.1 trainer.max_steps=8000
  dpbench train strategy.target_epsilon=3
  dpbench train strategy=none                       the baseline without privacy
  dpbench train -m optimizer.lr=0.1,0.2 seed=0,1    a sweep (Hydra multirun)
  dpbench train logger=tensorboard                  or csv, mlflow, many, none instead of wandb
  dpbench train --cfg job                           print the composed configuration
  dpbench train hydra.run.dir=runs/demo             a run in a folder of your choice
  dpbench resume runs/demo                          continue it after Ctrl-C, a crash or a full disk
"""

_HELP = """\
usage: dpbench train [-m] [--cfg job] [GROUP=NAME ...] [KEY=VALUE ...]

Train and test one model; with -m, one for each combination of comma-separated values.

{groups}

Any key of the composed configuration can be overridden; `dpbench train --cfg job` prints it.

{examples}"""


def add_parser(commands: Commands) -> None:
    """List the command; Hydra reads its words."""
    add_overrides(add_command(commands, "train", "Train and test a model.", add_help=False), "overrides of Hydra")


def run(options: argparse.Namespace) -> int:
    """Launch the run or the sweep, or show help."""
    from dpbench.harness.run.jobs import launch
    from dpbench.harness.run.search_path import conf_dir, groups_of, plugin_dirs

    if "-h" in options.words or "--help" in options.words:
        lines = []
        for group, names in groups_of(conf_dir(), *plugin_dirs()).items():
            lines.append(f"  {group + '=':<13}{' | '.join(names)}")
        print(_HELP.format(groups="\n".join(lines), examples=EXAMPLES))
        return 0
    launch(options.words, train_and_report, afterwards=report_sweep)
    return 0


def report_sweep(sweep: Sweep) -> None:
    """Print the table of a sweep that has ended, and where it lies."""
    from dpbench.harness.reports.end_of_sweep import end_of_sweep

    text = end_of_sweep(sweep)
    if text is not None:
        print(f"\n{text}")


def train_and_report(cfg: DictConfig, trust: bool = False) -> list[float] | None:
    """Run the job of `dpbench train` and `dpbench resume`: train, then draw and print the results.

    Args:
        cfg: The composed configuration.
        trust: True if the checkpoint of a run that is resumed may hold objects.
    """
    from dpbench.harness.reports.end_of_run import EndOfRun
    from dpbench.harness.run.train import train_job

    return train_job(cfg, reporter=EndOfRun(), trust=trust)
