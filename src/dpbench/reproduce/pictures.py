"""The pictures of a table: its cells with intervals, and learning curves."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from dpbench.reproduce.tables import Table
from dpbench.results.figures import new_figure, write_figure

_STYLES = ("-", "--", ":", "-.")


def _label(table: Table) -> str:
    return f"{'test' if table.metric.startswith('test') else 'validation'} accuracy (%)"


def draw_table(table: Table, lines: pd.DataFrame, folder: Path) -> None:
    """figure.png and figure.pdf: ours with 95 % intervals of the mean, the paper's figures as crosses.

    Args:
        table: The definition.
        lines: A line for each cell, see `outputs.summary`.
        folder: Where to.
    """
    figure = new_figure(max(6.0, 1.6 * len(table.rows) + 2), 4.5)
    axes = figure.add_subplot()
    width = 0.7 / len(table.columns)
    for number, column in enumerate(table.columns):
        own = lines[lines["column"] == column.name]
        places = [at + (number - (len(table.columns) - 1) / 2) * width for at in range(len(own))]
        colour = f"C{number % 10}"
        axes.errorbar(places, own["mean"], own["half"], fmt="o", color=colour, capsize=4, label=f"{column.label}, ours")
        if own["paper"].notna().any():
            printed = own["paper"].astype(float)
            axes.plot(places, printed, "x", color=colour, markersize=9, label=f"{column.label}, paper")
    axes.set_xticks(range(len(table.rows)), [row.label for row in table.rows], fontsize=8)
    axes.set_ylabel(_label(table))
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
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
