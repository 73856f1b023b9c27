"""Pictures of a table: its cells with intervals, and what its runs logged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.harness.reports.figures import new_figure, write_figure
from dpbench.harness.reports.plots import draw_histogram
from dpbench.harness.reproduce._results import CURVES, GRADIENTS
from dpbench.harness.reproduce.tables import Series, Table, select_cell

_FEW = 2  # runs, which say nothing about their spread
_STYLES = ("-", "--", ":", "-.")
_TOGETHER = 12  # curves in one panel
_ROOM = (0.03, 0.97)  # quantiles of a curve's values between which the axis always reaches


def draw_table(table: Table, runs: pd.DataFrame, lines: pd.DataFrame, folder: Path) -> None:
    """Draw figure.png and figure.pdf: runs as dots, 95 % intervals of the means, the paper's figures as crosses.

    Rows and columns of which nothing was run are left out.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv.
        lines: A line for each cell, see `_summary.summary`.
        folder: Where to.
    """
    rows = [row for row in table.rows if row.name in set(runs["row"])]
    columns = [column for column in table.columns if column.name in set(runs["column"])]
    runs = runs.assign(value=table.measure.scale * runs["value"])
    figure = new_figure(8.0, 1.6 + len(rows) * (0.25 + 0.17 * len(columns)))
    axes = figure.add_subplot()
    values: list[pd.Series[Any]] = []
    # Columns of a row lie below each other, so that their intervals do not cover one another.
    shifts = np.linspace(-0.35, 0.35, 2 * len(columns) + 1)[1::2]
    for number, (column, shift) in enumerate(zip(columns, shifts, strict=True)):
        color = f"C{number % 10}"
        heights = pd.Series({row.name: place + shift for place, row in enumerate(rows)})
        part = runs[runs["column"] == column.name]
        axes.plot(part["value"], part["row"].map(heights), ".", color=color, alpha=0.45, markersize=5)
        cells = lines[(lines["column"] == column.name) & lines["row"].isin(heights.index)]
        height = cells["row"].map(heights)
        half = cells["half"].where(cells["n"] > _FEW)
        label = f"{column.label}, ours"
        axes.errorbar(cells["mean"], height, xerr=half, fmt="o", color=color, capsize=3, label=label)
        if cells["paper"].notna().any():
            axes.plot(cells["paper"], height, "x", color=color, markersize=9, label=f"{column.label}, paper")
        values += [part["value"], cells["paper"]]
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.invert_yaxis()
    # Of what was measured, not of the intervals: those of few runs that differ much may be wider than the picture.
    shown = pd.concat(values).dropna()
    if len(shown):
        least = 1.0 if table.measure.percent else 0.05 * float(shown.abs().max()) or 1.0
        margin = max(least, 0.15 * float(shown.max() - shown.min()))
        axes.set_xlim(
            max(table.measure.least, float(shown.min()) - margin),
            min(table.measure.most, float(shown.max()) + margin),
        )
    axes.set_xlabel(table.measure.label)
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    for suffix in ("png", "pdf"):
        write_figure(folder / f"figure.{suffix}", figure)


def draw_logged(table: Table, name: str, frame: pd.DataFrame, path: Path) -> None:
    """Draw something that the runs of a table logged.

    Args:
        table: The definition.
        name: Of the curves, of the values of gradients, or of one of the definition's series.
        frame: Columns row and column, and what was logged.
        path: The picture.
    """
    if name == CURVES:
        figure = _curves(table, frame)
    elif name == GRADIENTS:
        figure = _histograms(table, frame)
    else:
        figure = _series(table, frame, next(series for series in table.series if series.name == name))
    figure.suptitle(table.title, fontsize=10)
    write_figure(path, figure)


def _curves(table: Table, curves: pd.DataFrame) -> Figure:
    """Learning curves: the mean over seeds after each evaluation, and the range of the seeds.

    Rows have colors. Columns have line styles, or panels where that were too many lines.
    """
    curves = curves.assign(value=table.measure.scale * curves["value"])
    panels = [list(table.columns)]
    if curves.groupby(["row", "column"]).ngroups > _TOGETHER:
        panels = [[column] for column in table.columns]
    figure = new_figure(8.0 if len(panels) == 1 else 2.0 + 3.5 * len(panels), 4.5)
    places = figure.subplots(
        1,
        len(panels),
        squeeze=False,
        sharey=True,
    )[0]
    for axes, columns in zip(places, panels, strict=True):
        for number, row in enumerate(table.rows):
            for column, style in zip(columns, _STYLES * len(columns), strict=False):
                part = select_cell(curves, row, column)
                label = row.label if len(columns) == 1 else f"{row.label}; {column.label}"
                if len(part):
                    _draw_curve(axes, part, style, f"C{number % 10}", label)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(panels) > 1:
            axes.set_title(columns[0].label, fontsize=9)
    places[0].set_ylim(*_curve_limits(table, curves))
    places[0].set_ylabel(table.measure.label)
    places[-1].legend(
        fontsize=7,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )
    return figure


def _curve_limits(table: Table, curves: pd.DataFrame) -> tuple[float, float]:
    """Of the axis: the worst of the first steps may be cut, never where a run ends."""
    last = curves.sort_values("step").groupby(["row", "column", "seed"])["value"].last()
    low, high = curves["value"].quantile(_ROOM)
    if table.measure.lower_is_better:
        return 0.0, 1.05 * max(float(high), float(last.max()))
    unit = table.measure.scale / 100
    lowest = min(float(low), float(last.min())) - 2 * unit
    highest = float(curves["value"].max()) + 0.5 * unit
    return max(table.measure.least, lowest), min(table.measure.most, highest)


def _draw_curve(axes: Axes, part: pd.DataFrame, style: str, color: str, label: str) -> None:
    steps = part.groupby("step")["value"].agg(["mean", "min", "max"])
    marker = "o" if len(steps) == 1 else None
    axes.plot(
        steps.index,
        steps["mean"],
        style,
        color=color,
        label=label,
        linewidth=1.3,
        marker=marker,
    )
    axes.fill_between(
        steps.index,
        steps["min"],
        steps["max"],
        color=color,
        alpha=0.15,
        linewidth=0,
    )


def _series(table: Table, lines: pd.DataFrame, series: Series) -> Figure:
    """Values against steps: a panel for each cell, or for each column where a cell has but one line.

    Names that end in "bias" are dashed.
    """
    one_line_each = lines.groupby(["row", "column"])["name"].nunique().max() == 1
    panels: dict[str, dict[str, pd.DataFrame]] = {}
    for column in table.columns:
        for row in table.rows:
            part = select_cell(lines, row, column)
            if part.empty:
                continue
            if one_line_each:
                panels.setdefault(column.label, {})[row.label] = part
            else:
                by_name: Any = part.groupby("name", sort=False)
                panels[table.label_of(row, column)] = dict(list(by_name))
    across = len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels)))
    down = math.ceil(len(panels) / across)
    figure = new_figure(5.5 * across, 4.0 * down)
    places = figure.subplots(down, across, squeeze=False).flatten()
    # The grid may have more places than there are panels.
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (title, curves) in zip(places, panels.items(), strict=False):
        for name, values in curves.items():
            style = "--" if name.endswith("bias") else "-"
            axes.plot(
                values["step"],
                values["value"],
                style,
                label=name,
                linewidth=1.1,
            )
        axes.set(yscale=series.scale, xlabel="step", ylabel=series.label)
        if series.scale == "linear" and lines["value"].min() >= 0:
            axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(
            fontsize=7,
            frameon=False,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
    return figure


def _histograms(table: Table, counts: pd.DataFrame) -> Figure:
    """How large the values of gradients are, all steps and parameters together: a panel for each cell.

    The frame has columns log10_from, log10_to and count; the first bin holds the zeros.
    """
    panels = {}
    for row, column in table.cells:
        part = select_cell(counts, row, column)
        if len(part):
            panels[table.label_of(row, column)] = part
    figure = new_figure(5.0 * len(panels), 3.6)
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (label, part) in zip(places, panels.items(), strict=True):
        zeros = draw_histogram(axes, part)
        axes.set_title(f"{label} ({zeros:.0f} % are below 1e-9)", fontsize=9)
        axes.set(xlabel="log10 |value of a record's gradient|", ylabel="share of values")
        axes.grid(alpha=0.3)
    return figure
