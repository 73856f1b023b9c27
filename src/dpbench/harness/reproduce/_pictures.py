"""Pictures of a table: its cells with intervals, and the logs of its runs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from dpbench.harness.reports.figures import add_legend, new_figure, new_panels, write_figure
from dpbench.harness.reports.plots import Curve, draw_histogram, panels_figure
from dpbench.harness.reproduce._results import CURVES, GRADIENTS
from dpbench.harness.reproduce.tables import Measure, Series, Table, select_cell

_FEW = 2  # runs, which say nothing about their spread
_TOGETHER = 12  # curves in one panel
_ROOM = (0.03, 0.97)  # quantiles of a curve's values between which the axis always reaches


def draw_table(table: Table, runs: pd.DataFrame, lines: pd.DataFrame, folder: Path) -> None:
    """Draw figure.png and figure.pdf: runs as dots, 95 % intervals of the means, the paper's figures as crosses.

    Rows and columns of which nothing was run are left out.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv.
        lines: A line for each cell, see `_summary.summary`.
        folder: Folder of the picture.
    """
    rows = [row for row in table.rows if row.name in set(runs["row"])]
    columns = [column for column in table.columns if column.name in set(runs["column"])]
    places = {row.name: place for place, row in enumerate(rows)}
    runs = runs.assign(value=table.measure.scale * runs["value"], place=runs["row"].map(places))
    lines = lines[lines["row"].isin(places)]
    lines = lines.assign(place=lines["row"].map(places), half=lines["half"].where(lines["n"] > _FEW))
    figure = new_figure(8.0, 1.6 + len(rows) * (0.25 + 0.17 * len(columns)))
    axes = figure.add_subplot()
    # Columns of a row lie below each other, so that their intervals do not cover one another.
    shifts = np.linspace(-0.35, 0.35, 2 * len(columns) + 1)[1::2]
    for number, (column, shift) in enumerate(zip(columns, shifts, strict=True)):
        color = f"C{number % 10}"
        part = runs[runs["column"] == column.name]
        cells = lines[lines["column"] == column.name]
        height = cells["place"] + shift
        axes.plot(part["value"], part["place"] + shift, ".", color=color, alpha=0.45, markersize=5)
        label = f"{column.label}, ours"
        axes.errorbar(cells["mean"], height, xerr=cells["half"], fmt="o", color=color, capsize=3, label=label)
        if cells["paper"].notna().any():
            axes.plot(cells["paper"], height, "x", color=color, markersize=9, label=f"{column.label}, paper")
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlim(table.measure.clipped(*axes.get_xlim()))
    axes.set_xlabel(table.measure.label)
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for suffix in ("png", "pdf"):
        write_figure(folder / f"figure.{suffix}", figure)


def draw_logged(table: Table, name: str, frame: pd.DataFrame, path: Path) -> None:
    """Draw something that the runs of a table logged.

    Args:
        table: The definition.
        name: Name of the curves, of the values of gradients, or of one of the definition's series.
        frame: Columns row and column, and those of the log.
        path: The picture.
    """
    if name == GRADIENTS:
        figure = _histograms(table, frame)
    elif name == CURVES:
        figure = _curves(table, frame)
    else:
        figure = _series(table, frame, next(series for series in table.series if series.name == name))
    figure.suptitle(table.title, x=0.01, ha="left", fontsize=10)  # the legend is to the right
    write_figure(path, figure)


def _curves(table: Table, curves: pd.DataFrame) -> Figure:
    """Learning curves: mean and standard deviation over seeds after each evaluation.

    Rows have colors. Columns have dashes, or panels where that were too many curves.
    """
    curves = curves.assign(value=table.measure.scale * curves["value"])
    is_together = curves.groupby(["row", "column"]).ngroups <= _TOGETHER
    panels: dict[str, list[Curve]] = {}
    for (place, column), (number, row) in product(enumerate(table.columns), enumerate(table.rows)):
        steps: Any = select_cell(curves, row, column).groupby("step")["value"].agg(value="mean", band="std")
        if len(steps) and is_together:
            panels.setdefault("", []).append((table.label_of(row, column), 10 * place + number, steps))
        elif len(steps):
            panels.setdefault(column.label, []).append((row.label, number, steps))
    figure = panels_figure(panels, "step", width=8.0 if len(panels) == 1 else 5.0, sharey=True)
    figure.axes[0].set(ylim=_curve_limits(table.measure, curves), ylabel=table.measure.label)
    add_legend(figure)
    return figure


def _curve_limits(measure: Measure, curves: pd.DataFrame) -> tuple[float, float]:
    """Limits of the axis: the worst of the first steps may be cut, never where a run ends."""
    last = curves.sort_values("step").groupby(["row", "column", "seed"])["value"].last()
    low, high = curves["value"].quantile(_ROOM)
    if measure.lower_is_better:
        return 0.0, 1.05 * max(high, last.max())
    unit = measure.scale / 100
    return measure.clipped(min(low, last.min()) - 2 * unit, curves["value"].max() + 0.5 * unit)


def _series(table: Table, lines: pd.DataFrame, series: Series) -> Figure:
    """Values against steps: a panel for each cell, or for each column where a cell has but one line."""
    has_one_line = lines.groupby(["row", "column"])["name"].nunique().max() == 1
    panels: dict[str, list[Curve]] = {}
    numbers: dict[str, int] = {}
    for column, row in product(table.columns, table.rows):
        for name, part in select_cell(lines, row, column).groupby("name", sort=False):
            title, label = (column.label, row.label) if has_one_line else (table.label_of(row, column), str(name))
            curve = part.set_index("step").reindex(columns=["value", "band"])
            panels.setdefault(title, []).append((label, numbers.setdefault(label, len(numbers)), curve))
    figure = panels_figure(panels, "step")
    for axes in figure.axes:
        axes.set(yscale=series.scale, ylabel=series.label)
        if series.scale == "linear" and lines["value"].min() >= 0:
            axes.set_ylim(bottom=0)
    add_legend(figure)
    return figure


def _histograms(table: Table, counts: pd.DataFrame) -> Figure:
    """How large the values of gradients are, all steps and parameters together: a panel for each cell.

    The frame has columns log10_from, log10_to and count; the first bin holds the zeros.
    """
    parts = {table.label_of(*cell): select_cell(counts, *cell) for cell in table.cells}
    panels = {label: part for label, part in parts.items() if len(part)}
    figure, places = new_panels(len(panels), 4, 5.0, 3.6)
    for axes, (label, part) in zip(places, panels.items(), strict=True):
        zeros = draw_histogram(axes, part)
        axes.set(xlabel="log10 |value of a record's gradient|", ylabel="share of values")
        axes.set_title(f"{label} ({zeros:.0f} % are below 1e-9)", fontsize=9)
    return figure
