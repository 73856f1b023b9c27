"""`dpbench table`: finished runs side by side."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Commands, add_command, place

_EPILOG = """\
examples:
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench table runs/sweep
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "table", "finished runs side by side", _EPILOG)
    parser.add_argument("folders", type=place, nargs="+", metavar="FOLDER", help="folders of runs or sweeps")
    parser.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    from dpbench.reports.table import collect, markdown

    runs = collect(options.folders)
    print(runs.to_csv(index=False) if options.csv else markdown(runs))
    return 0
