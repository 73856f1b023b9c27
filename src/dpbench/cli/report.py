"""`dpbench report`: runs on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpbench.cli.arguments import Commands, add_command, html, place

_EPILOG = """\
The page is one file that needs nothing beside itself, and asks nobody for anything. What is called nonprivate/ in it
was computed on training records without noise.

examples:
  dpbench train hydra.run.dir=runs/demo
  dpbench report runs/demo                          report.html
  dpbench train -m seed=0,1 hydra.sweep.dir=runs/sweep
  dpbench report runs/sweep --out sweep.html        mean and deviation over seeds
  dpbench report runs/demo --accountant all --out demo.html
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "report", "runs on one page: curves, epsilon, audit, settings, provenance", _EPILOG)
    what = "folder of a run, a sweep, or a table's results"
    parser.add_argument("sources", type=place, nargs="+", metavar="WHAT", help=what)
    out = "default: report.html"
    parser.add_argument("--out", type=html, default=Path("report.html"), metavar="HTML", help=out)
    names = "whose epsilon over steps is drawn, several with commas, or all (default: rdp,pld)"
    parser.add_argument("--accountant", default="rdp,pld", metavar="NAME", help=names)
    parser.add_argument("--force", action="store_true", help="replace a file that is no such page")


def run(options: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    from dpbench.reports.account import accountant_names
    from dpbench.reports.page import write_report

    names = accountant_names(options.accountant)
    print("report:", write_report(options.sources, options.out, names, options.force))
    return 0
