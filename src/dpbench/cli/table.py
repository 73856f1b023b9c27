"""`dpbench table`: finished runs side by side."""

from __future__ import annotations

import argparse
import sys

from dpbench.cli.arguments import Commands, add_command, place
from dpbench.errors import ConfigurationError

_EPILOG = """\
examples:
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench table runs/sweep
  dpbench table runs/sweep --folder                 where each run lies
  dpbench table runs/sweep --group-by optimizer.lr
  dpbench table runs --group-by strategy,optimizer.lr --csv
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "table", "finished runs side by side", _EPILOG)
    parser.add_argument("folders", type=place, nargs="+", metavar="FOLDER", help="folders of runs or sweeps")
    groups = "one row for each combination of these settings (optimizer.lr,strategy), with mean ± standard deviation"
    parser.add_argument("--group-by", metavar="KEYS", help=groups)
    parser.add_argument("--folder", action="store_true", help="a column with the folder of each run")
    parser.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    if options.group_by is not None and options.folder:
        raise ConfigurationError("--folder is of single runs, and a row of --group-by holds several: leave one out.")
    _print(options)
    from dpbench.runs.folder import finished_runs_below
    from dpbench.runs.shared_noise import shared_noise

    for line in shared_noise(finished_runs_below(options.folders)):
        print(f"dpbench: note: {line}", file=sys.stderr)
    return 0


def _print(options: argparse.Namespace) -> None:
    if options.group_by is not None:
        _print_groups(options)
        return
    from dpbench.reports.run_table import RunTable

    table = RunTable.read(options.folders)
    print(table.to_csv(options.folder) if options.csv else table.to_markdown(options.folder))


def _print_groups(options: argparse.Namespace) -> None:
    """Print the table by groups; as CSV without its notes, which go to stderr."""
    from dpbench.reports.run_table import grouped, keys_of

    groups = grouped(options.folders, keys_of(options.group_by))
    if not options.csv:
        print(groups.to_markdown())
        return
    print(groups.to_csv(), end="")
    for note in groups.notes:
        print(f"dpbench: note: {note}", file=sys.stderr)
