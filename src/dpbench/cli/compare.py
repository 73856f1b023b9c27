"""`dpbench compare`: how runs differ in settings, metrics and curves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpbench.cli.arguments import Commands, add_command, png, text

_EPILOG = """\
examples:
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench compare runs/sweep                        every run of a sweep
  dpbench compare runs/demo multirun --plot curves.png
  dpbench compare runs/sweep --mean --axis epsilon  means over seeds, against the epsilon that was spent
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "compare", "how runs differ: settings, metrics, curves", _EPILOG)
    what = "folder of a run, a sweep or a table's results, or wandb:ENTITY/PROJECT[:GROUP]"
    parser.add_argument("sources", type=text, nargs="+", metavar="WHAT", help=what)
    parser.add_argument("--plot", type=png, default=Path("compare.png"), metavar="PNG", help="default: compare.png")
    axis = "what the curves are drawn over: step (default), or epsilon, which needs private runs"
    parser.add_argument("--axis", choices=["step", "epsilon"], default="step", help=axis)
    means = "mean ± standard deviation of runs that differ by their seed only"
    parser.add_argument("--mean", action="store_true", help=means)


def run(options: argparse.Namespace) -> int:
    """Print the comparison and draw the curves."""
    from dpbench.reports.plots import draw_comparison
    from dpbench.reports.run_table import RunTable
    from dpbench.runs.folder import finished_runs_below
    from dpbench.runs.shared_noise import shared_noise

    table = RunTable.read_sources(options.sources)
    table = table.over_seeds() if options.mean else table
    print(table.compare())
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    print("\ncurves:", draw_comparison(table, options.plot, options.axis) or "none of these logged any")
    folders = [Path(source) for source in options.sources if Path(source).is_dir()]
    for line in shared_noise(finished_runs_below(folders)):
        print(f"dpbench: note: {line}", file=sys.stderr)
    return 0
