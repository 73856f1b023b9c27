"""Commands that show runs: `dpbench table`, `dpbench compare` and `dpbench report`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dpbench.cli.arguments import Answer, Commands, add_command, add_json, add_runs, file, note, picture
from dpbench.errors import ConfigurationError

_TABLE = """\
examples:
  dpbench table runs/sweep --folder                 with the folder of each run
  dpbench table runs/sweep --group-by optimizer.lr
  dpbench table runs multirun --csv
"""

_COMPARE = """\
examples:
  dpbench compare runs/demo multirun --plot curves.png
  dpbench compare runs/sweep --mean --axis epsilon  means over seeds, against the epsilon that was spent
"""

_REPORT = """\
The page is one self-contained file that loads nothing from the network. Figures under nonprivate/ were computed on
training records without noise.

examples:
  dpbench report runs/demo                          report.html
  dpbench report runs/sweep --out sweep.html        mean and deviation over seeds
"""


def add_parsers(commands: Commands) -> None:
    """Add the commands."""
    _add_table(commands)
    _add_compare(commands)
    _add_report(commands)


def _add_table(commands: Commands) -> None:
    parser = add_command(commands, "table", "Show finished runs side by side.", _table, epilog=_TABLE)
    add_runs(parser, "folders of runs or sweeps")
    parser.add_argument(
        "--group-by",
        metavar="KEYS",
        help="one row for each combination of these settings (optimizer.lr,strategy), with mean ± standard deviation",
    )
    parser.add_argument("--folder", action="store_true", help="add a column with each run's folder")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV instead of Markdown")
    form.add_argument("--latex", action="store_true", help="print LaTeX (booktabs)")
    form.add_argument(
        "--leaderboard",
        action="store_true",
        help="print an entry, in YAML, of the leaderboard of arXiv 2601.17189; fill in what is ...",
    )
    add_json(form)


def _table(options: argparse.Namespace) -> Answer:
    from dpbench.harness.reports.groups import group_by, keys_of
    from dpbench.harness.reports.leaderboard import leaderboard
    from dpbench.harness.reports.run_table import RunTable

    if options.folder and options.group_by is not None:
        raise ConfigurationError("--folder requires single runs, and --group-by combines several: remove one of them.")
    if options.leaderboard and options.group_by is not None:
        raise ConfigurationError("--leaderboard combines runs that differ by their seeds: remove --group-by.")
    table = RunTable.read(options.sources)
    if options.group_by is not None:
        table = group_by(table, keys_of(options.group_by))
    text = table.to_markdown(options.folder)
    if options.csv:
        text = table.to_csv(options.folder)
    elif options.latex:
        text = table.to_latex(options.folder)
    elif options.leaderboard:
        text = leaderboard(table)
    if options.csv or options.latex or options.leaderboard or options.json:  # Markdown has them below the table
        for line in table.notes:
            note(line)
    _note_shared_noise(options.sources)
    return Answer(text.rstrip("\n"), table.to_records(options.folder))


def _note_shared_noise(sources: Sequence[Path]) -> None:
    from dpbench.harness.runs.folder import finished_runs_below
    from dpbench.harness.runs.ledgers import shared_noise

    for line in shared_noise(finished_runs_below(sources)):
        note(line)


def _add_compare(commands: Commands) -> None:
    summary = "Show how runs differ: settings, metrics, curves."
    parser = add_command(commands, "compare", summary, _compare, epilog=_COMPARE)
    add_runs(parser, "folders of runs or sweeps")
    parser.add_argument(
        "--plot",
        type=picture,
        metavar="FILE",
        default=Path("compare.png"),
        help="picture of the curves, .png or .pdf (default: compare.png)",
    )
    parser.add_argument(
        "--axis",
        choices=["step", "epsilon"],
        default="step",
        help="x-axis of the curves: step (default), or epsilon, which needs private runs",
    )
    parser.add_argument(
        "--mean",
        action="store_true",
        help="mean ± standard deviation of runs that differ by their seed only",
    )
    add_json(parser)


def _compare(options: argparse.Namespace) -> Answer:
    from dpbench.harness.reports.plots import draw_comparison
    from dpbench.harness.reports.run_table import RunTable

    table = RunTable.read(options.sources, curves=True)
    if options.mean:
        table = table.over_seeds()
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    replaced = " (replaced)" if options.plot.exists() else ""
    drawn = draw_comparison(table, options.plot, options.axis)
    _note_shared_noise(options.sources)
    curves = "none of these logged any" if drawn is None else f"{drawn}{replaced}"
    text = "\n\n".join([table.compare(), *table.notes, f"curves: {curves}"])
    return Answer(text, table.to_records(wide=True))


def _add_report(commands: Commands) -> None:
    summary = "Write runs on one HTML page: curves, epsilon, audit, settings, provenance."
    parser = add_command(commands, "report", summary, _report, epilog=_REPORT)
    add_runs(parser, "folders of runs or sweeps")
    parser.add_argument(
        "--out",
        type=file,
        metavar="HTML",
        default=Path("report.html"),
        help="default: report.html",
    )
    parser.add_argument("--force", action="store_true", help="replace a file that is not a dpbench report")


def _report(options: argparse.Namespace) -> Answer:
    from dpbench.harness.reports.page import write_report

    replaced = write_report(options.sources, options.out, options.force)
    return Answer(f"report: {options.out}{' (replaced)' if replaced else ''}")
