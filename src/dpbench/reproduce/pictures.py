"""The pictures of a table: its cells with intervals, and learning curves."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from dpbench.reproduce.tables import Table
from dpbench.results.figures import new_figure, write_figure

_FEW = 2  # runs
_STYLES = ("-", "--", ":", "-.")


def _label(table: Table) -> str:
    return f"{'test' if table.metric.startswith('test') else 'validation'} accuracy (%)"


def draw_table(table: Table, runs: pd.DataFrame, lines: pd.DataFrame, folder: Path) -> None:
    """figure.png and figure.pdf: every run as a dot, 95 % intervals of the means, the paper's figures as crosses.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv.
        lines: A line for each cell, see `outputs.summary`.
        folder: Where to.
    """
    figure = new_figure(8.0, 1.6 + len(table.rows) * (0.25 + 0.17 * len(table.columns)))
    axes = figure.add_subplot()
    for number, column in enumerate(table.columns):
        colour, shift = f"C{number % 10}", (number - (len(table.columns) - 1) / 2) * 0.7 / len(table.columns)
        places = {row.name: at + shift for at, row in enumerate(table.rows)}
        own = runs[(runs["column"] == column.name) & runs["row"].isin(list(places))]
        axes.plot(100 * own["value"], own["row"].map(places), ".", color=colour, alpha=0.45, markersize=5)
        cells = lines[lines["column"] == column.name]
        half = cells["half"].where(cells["n"] > _FEW)  # two runs say nothing about their spread
        at = cells["row"].map(places)
        axes.errorbar(cells["mean"], at, xerr=half, fmt="o", color=colour, capsize=3, label=f"{column.label}, ours")
        if cells["paper"].notna().any():
            printed = cells["paper"].astype(float)
            axes.plot(printed, at, "x", color=colour, markersize=9, label=f"{column.label}, paper")
    axes.set_yticks(range(len(table.rows)), [row.label for row in table.rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(_label(table))
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for suffix in ("png", "pdf"):
        write_figure(folder / f"figure.{suffix}", figure)


def draw_curves(table: Table, curves: pd.DataFrame, folder: Path) -> None:
    """curves.png: the mean over seeds after each evaluation, and the range of the seeds.

    Args:
        table: The definition; rows have colours, columns line styles.
        curves: Columns row, column, seed, step, value.
        folder: Where to.
    """
    figure = new_figure(8.0, 4.5)
    axes = figure.add_subplot()
    for number, row in enumerate(table.rows):
        for column, style in zip(table.columns, _STYLES * len(table.columns), strict=False):
            own = curves[(curves["row"] == row.name) & (curves["column"] == column.name)]
            if own.empty:
                continue
            steps = 100 * own.groupby("step")["value"].agg(["mean", "min", "max"])
            label = row.label if len(table.columns) == 1 else f"{row.label}; {column.label}"
            axes.plot(steps.index, steps["mean"], style, color=f"C{number % 10}", label=label, linewidth=1.3)
            axes.fill_between(steps.index, steps["min"], steps["max"], color=f"C{number % 10}", alpha=0.15, linewidth=0)
    shown = 100 * curves["value"]
    axes.set_ylim(
        max(0.0, float(shown.quantile(0.03)) - 2), min(100.0, float(shown.max()) + 0.5)
    )  # the first steps may be cut
    axes.set_xlabel("step")
    axes.set_ylabel(_label(table))
    axes.set_title(table.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    write_figure(folder / "curves.png", figure)
