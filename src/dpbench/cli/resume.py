"""`dpbench resume`: an interrupted run goes on, a finished one with more steps."""

from __future__ import annotations

import argparse
from functools import partial

from dpbench.cli.arguments import Commands, add_command, add_trust, place

_EPILOG = """\
Nothing in the folder is imported or unpickled. Its config.yaml says which classes of installed packages are made, and
where data lie: read it before you resume what somebody else gave you.

examples:
  dpbench train trainer.max_steps=5000 hydra.run.dir=runs/long     stop it with Ctrl-C
  dpbench resume runs/long
  dpbench resume runs/long trainer.max_steps=9000                  more steps for a finished run
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    usage = "dpbench resume RUN [KEY=VALUE ...] [--trust]"
    parser = add_command(
        commands, "resume", "continue an interrupted run, or a finished one with more steps", _EPILOG, usage=usage
    )
    parser.add_argument("folder", type=place, metavar="RUN", help="the run's folder")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="such as trainer.max_steps=2000")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Launch the run again in its folder."""
    from dpbench.cli.train import train_and_report
    from dpbench.run.jobs import resume

    return resume(options.folder, options.overrides, partial(train_and_report, trust=options.trust))
