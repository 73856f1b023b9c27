"""`dpbench compare`: how runs differ in settings, metrics and curves."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpbench.cli.arguments import Commands, add_command, png, text

_EPILOG = """\
examples:
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench compare runs/sweep                        every run of a sweep
  dpbench compare runs/demo multirun --plot curves.png
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "compare", "how runs differ: settings, metrics, curves", _EPILOG)
    what = "folder of a run, a sweep or a table's results, or wandb:ENTITY/PROJECT[:GROUP]"
    parser.add_argument("sources", type=text, nargs="+", metavar="WHAT", help=what)
    parser.add_argument("--plot", type=png, default=Path("compare.png"), metavar="PNG", help="default: compare.png")


def run(options: argparse.Namespace) -> int:
    """Print the comparison and draw the curves."""
    from dpbench.reports.compare import compare, draw, load

    runs = []
    for source in options.sources:
        if source.startswith("wandb:"):
            from dpbench.reports.wandb_runs import recorded

            runs += recorded(source.removeprefix("wandb:"))
        else:
            runs += load(source)
    print(compare(runs))
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    print("\ncurves:", draw(runs, options.plot) or "none of these logged any")
    return 0
