"""The pictures of a table: its cells with intervals, learning curves, and whatever else its runs logged."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce.tables import Series, Table, select_cell

_FEW = 2  # runs
_STYLES = ("-", "--", ":", "-.")
_TOGETHER = 12  # curves in one panel


def draw_table(table: Table, runs: pd.DataFrame, lines: pd.DataFrame, folder: Path) -> None:
    """figure.png and figure.pdf: every run as a dot, 95 % intervals of the means, the paper's figures as crosses.

    Rows and columns of which nothing was run are left out.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv.
        lines: A line for each cell, see `outputs.summary`.
        folder: Where to.
    """
    table, lines = _with_runs(table, runs, lines)
    figure = new_figure(8.0, 1.6 + len(table.rows) * (0.25 + 0.17 * len(table.columns)))
    axes, scale = figure.add_subplot(), table.measure.scale
    for number, column in enumerate(table.columns):
        color, shift = f"C{number % 10}", (number - (len(table.columns) - 1) / 2) * 0.7 / len(table.columns)
        places = {row.name: at + shift for at, row in enumerate(table.rows)}
        own = runs[(runs["column"] == column.name) & runs["row"].isin(list(places))]
        axes.plot(scale * own["value"], own["row"].map(places), ".", color=color, alpha=0.45, markersize=5)
        cells = lines[lines["column"] == column.name]
        half = cells["half"].where(cells["n"] > _FEW)  # two runs say nothing about their spread
        at = cells["row"].map(places)
        axes.errorbar(cells["mean"], at, xerr=half, fmt="o", color=color, capsize=3, label=f"{column.label}, ours")
        if cells["paper"].notna().any():
            printed = cells["paper"].astype(float)
            axes.plot(printed, at, "x", color=color, markersize=9, label=f"{column.label}, paper")
    axes.set_yticks(range(len(table.rows)), [row.label for row in table.rows], fontsize=8)
    axes.invert_yaxis()
    _show_what_was_seen(axes, table, pd.concat([scale * runs["value"], lines["paper"].astype(float)]).dropna())
    axes.set_xlabel(table.measure.label)
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for suffix in ("png", "pdf"):
        write_figure(folder / f"figure.{suffix}", figure)


def _with_runs(table: Table, runs: pd.DataFrame, lines: pd.DataFrame) -> tuple[Table, pd.DataFrame]:
    """A table, and the lines of its cells, without rows and columns that have no run; as it is where none has."""
    rows, columns = (
        [one.name for one in parts if (runs[kind] == one.name).any()]
        for kind, parts in (("row", table.rows), ("column", table.columns))
    )
    if not (rows and columns):
        return table, lines
    kept = lines[lines["row"].isin(rows) & lines["column"].isin(columns)]
    return table.selected(rows, columns, None), kept


def _show_what_was_seen(axes: Axes, table: Table, seen: pd.Series[float]) -> None:
    """Intervals of few runs that differ much may be wider than the picture."""
    if len(seen):
        least = 1.0 if table.measure.percent else 0.05 * float(seen.abs().max()) or 1.0
        margin = max(least, 0.15 * float(seen.max() - seen.min()))
        axes.set_xlim(
            max(table.measure.least, float(seen.min()) - margin), min(table.measure.most, float(seen.max()) + margin)
        )


def draw_curves(table: Table, curves: pd.DataFrame, path: Path) -> None:
    """Learning curves: the mean over seeds after each evaluation, and the range of the seeds.

    Args:
        table: The definition; rows have colors. Columns have line styles, or panels where that were too many lines.
        curves: Columns row, column, seed, step, value.
        path: The picture.
    """
    lines = len(curves.groupby(["row", "column"]))
    panels = [[column] for column in table.columns] if lines > _TOGETHER else [list(table.columns)]
    scale = table.measure.scale
    figure = new_figure(8.0 if len(panels) == 1 else 2.0 + 3.5 * len(panels), 4.5)
    every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, columns in zip(every, panels, strict=True):
        for number, row in enumerate(table.rows):
            for column, style in zip(columns, _STYLES * len(columns), strict=False):
                own = select_cell(curves, row, column)
                label = row.label if len(columns) == 1 else f"{row.label}; {column.label}"
                if not own.empty:
                    _draw_curve(axes, own.assign(value=scale * own["value"]), style, f"C{number % 10}", label)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(panels) > 1:
            axes.set_title(columns[0].label, fontsize=9)
    every[0].set_ylim(*_limits(table, curves))
    every[0].set_ylabel(table.measure.label)
    every[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(table.title, fontsize=10)
    write_figure(path, figure)


def _limits(table: Table, curves: pd.DataFrame) -> tuple[float, float]:
    """Of the axis: the worst of the first steps may be cut, never where a run ends."""
    shown = table.measure.scale * curves["value"]
    last = table.measure.scale * curves.sort_values("step").groupby(["row", "column", "seed"])["value"].last()
    if table.measure.lower_is_better:
        return 0.0, 1.05 * max(float(shown.quantile(0.97)), float(last.max()))
    lowest, room = min(float(shown.quantile(0.03)), float(last.min())), table.measure.scale / 100
    return max(table.measure.least, lowest - 2 * room), min(table.measure.most, float(shown.max()) + 0.5 * room)


def _draw_curve(axes: Axes, own: pd.DataFrame, style: str, color: str, label: str) -> None:
    steps = own.groupby("step")["value"].agg(["mean", "min", "max"])
    point = "o" if len(steps) == 1 else None
    axes.plot(steps.index, steps["mean"], style, color=color, label=label, linewidth=1.3, marker=point)
    axes.fill_between(steps.index, steps["min"], steps["max"], color=color, alpha=0.15, linewidth=0)


def draw_series(table: Table, lines: pd.DataFrame, series: Series, path: Path) -> None:
    """Values against steps: a panel for each cell, or for each column where a cell has but one line.

    Args:
        table: The definition.
        lines: Columns row, column, step, name, value. Names that end in "bias" are dashed.
        series: Which of the definition's.
        path: The picture.
    """
    single = lines.groupby(["row", "column"])["name"].nunique().max() == 1
    panels = []
    for column in table.columns:
        own = lines[lines["column"] == column.name]
        rows = [row for row in table.rows if (own["row"] == row.name).any()]
        parts = [(row.label, own[own["row"] == row.name]) for row in rows]
        if single and parts:
            panels.append((column.label, parts))
        for row_label, part in () if single else parts:
            title = row_label if len(table.columns) == 1 else f"{row_label}; {column.label}"
            panels.append((title, [(str(name), values) for name, values in part.groupby("name", sort=False)]))
    across = len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels)))
    down = math.ceil(len(panels) / across)
    figure = new_figure(5.5 * across, 4.0 * down)
    places = figure.subplots(down, across, squeeze=False).flatten()
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (title, drawn) in zip(places, panels, strict=False):
        for name, values in drawn:
            axes.plot(
                values["step"], values["value"], "--" if name.endswith("bias") else "-", label=name, linewidth=1.1
            )
        axes.set(yscale=series.scale, xlabel="step", ylabel=series.label)
        if series.scale == "linear" and lines["value"].min() >= 0:
            axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(table.title, fontsize=10)
    write_figure(path, figure)


def draw_histogram(table: Table, counts: pd.DataFrame, path: Path) -> None:
    """Draw how large the values of gradients are, all steps and parameters together: a panel for each cell.

    Args:
        table: The definition.
        counts: Columns row, column, log10_from, log10_to, count; the first bin holds the zeros.
        path: The picture.
    """
    found = [(row, column, select_cell(counts, row, column)) for row in table.rows for column in table.columns]
    found = [cell for cell in found if len(cell[2])]
    figure = new_figure(5.0 * len(found), 3.6)
    for axes, (row, column, own) in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        inner = own[np.isfinite(own["log10_from"]) & np.isfinite(own["log10_to"])]
        share, width = inner["count"] / own["count"].sum(), inner["log10_to"] - inner["log10_from"]
        axes.bar(inner["log10_from"], share, width=width, align="edge", color="#3060a8")
        label = row.label if len(table.columns) == 1 else f"{row.label}; {column.label}"
        zeros = 100 * own.loc[~np.isfinite(own["log10_from"]), "count"].sum() / own["count"].sum()
        axes.set_title(f"{label} ({zeros:.0f} % are below 1e-9)", fontsize=9)
        axes.set(xlabel="log10 |value of a record's gradient|", ylabel="share of values")
        axes.grid(alpha=0.3)
    figure.suptitle(table.title, fontsize=10)
    write_figure(path, figure)
