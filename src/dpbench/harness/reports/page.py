"""`dpbench report`: runs on one HTML page that loads nothing.

Facts are collected here and worded in templates/report*.html.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dpbench import __version__
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.harness.reports.end_of_sweep import cost_of_sweep
from dpbench.harness.reports.figures import FolderPicture, svg
from dpbench.harness.reports.plots import BOUND, curve_names, curves_figure
from dpbench.harness.reports.run_rows import RunRow, flat
from dpbench.harness.reports.run_table import RunTable
from dpbench.harness.runs import numbers
from dpbench.harness.runs.command import words_of
from dpbench.templates import render

_MOST_RUNS = 24  # whose settings and facts are shown one by one
_MOST_PANELS = 12  # of clipping bounds
_PICTURES = "dpbench.pictures"
"""Group of entry points: pictures that capabilities leave in folders."""
_MARK = '<meta name="generator" content="dpbench report'


def write_report(sources: Sequence[Path], out: Path, force: bool = False) -> bool:
    """Write the page of some runs.

    Args:
        sources: Folders of runs, or of sweeps.
        out: The file, which appears when it is complete.
        force: True to replace a file that is not such a page.

    Returns:
        True if a file was replaced.

    Raises:
        ConfigurationError: There is no run, a file of one is damaged, or something else is at `out`.
    """
    replaced = out.exists()
    if replaced and not force and _MARK not in out.read_text(encoding="utf-8", errors="replace"):
        raise ConfigurationError(f"{out} is not a dpbench report: choose another name, or replace it with --force.")
    text = render("report.html", version=__version__, **_facts(sources))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode("utf-8", "replace").decode("utf-8"))  # half of a surrogate pair is no text
    return replaced


def _facts(sources: Sequence[Path]) -> dict[str, Any]:
    """Collect everything that the template names."""
    table = RunTable.read(sources, curves=True)
    runs = table.rows
    alone = runs[0] if len(runs) == 1 else None
    groups = table.over_seeds()
    held_out = any(name.startswith("val/") for run in runs for name in run.metrics)
    cost = cost_of_sweep(sources) if len(runs) > 1 else None
    results = table.compared_rows() if alone is not None else []
    return {
        "title": ", ".join(source.resolve().name for source in sources) if alone is None else alone.name,
        "runs": runs,
        "notes": table.notes,
        "alone": alone,
        "seeded": [run for run in runs if run.private and not run.record["config"]["strategy"].get("secure")],
        "cost_of_choosing": [] if cost is None else cost.lines(held_out),
        "any_nonprivate_curve": any(name.startswith("nonprivate/") for name in curve_names(runs)),
        "any_mean": any(row.n > 1 and not row.curves.empty for row in groups.rows),
        "results_of_run": [(name, text) for name, text in results if text != numbers.ABSENT],
        "curves": _curves("Curves", groups, curve_names(groups.rows)),
        "bounds": _curves("Clipping bounds", groups, curve_names(groups.rows, BOUND)[:_MOST_PANELS]),
        "pictures": _pictures(sources),
        "image": _image,
        "side_by_side": groups.compared_rows(),
        "all_settings": _all_settings,
        "command": lambda run: shlex.join(words_of(run.folder)),
        "most_runs": _MOST_RUNS,
        "numbers": numbers,
    }


def _pictures(sources: Sequence[Path]) -> list[tuple[FolderPicture, list[Path]]]:
    """List the pictures that capabilities have left in folders, each with its files."""
    shown = [entry.load() for entry in entry_points(group=_PICTURES)]
    return [(picture, [source / picture.file for source in sources]) for picture in shown]


def _image(path: Path) -> str:
    """Embed a PNG; empty where there is none."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" if path.is_file() else ""


def _all_settings(run: RunRow) -> list[tuple[str, str]]:
    settings = []
    for key, value in flat(run.record["config"]).items():
        settings.append((key, value if isinstance(value, str) else json.dumps(value, default=str)))
    return settings


def _curves(title: str, table: RunTable, names: Sequence[str]) -> dict[str, str] | None:
    figure = curves_figure(table, names)
    return None if figure is None else {"title": title, "svg": svg(figure, title)}
