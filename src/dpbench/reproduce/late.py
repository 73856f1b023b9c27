"""Means over the last evaluations of each run, where accuracy still swings from one evaluation to the next."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from dpbench.reports.markdown import markdown_rows
from dpbench.reproduce.tables import Table, Variant, select_cell


def late_values(table: Table, curves: pd.DataFrame, row: Variant, column: Variant) -> pd.Series[float]:
    """Mean over the last evaluations of each run of a cell, as the table shows it, by seed.

    Args:
        table: The definition, which says over how many.
        curves: What the runs logged: columns row, column, seed, step, value.
        row: Of the cell.
        column: Of the cell.
    """
    own = select_cell(curves, row, column).sort_values(["seed", "step"])
    # The test after step S is of the same weights as the validation that is logged at S − 1.
    again = (own["step"].diff() == 1) & (own["value"].diff() == 0) & (own["seed"].diff() == 0)
    own = own[~again]
    last = own.groupby("seed").tail(table.last_evaluations)
    return table.measure.scale * last.groupby("seed")["value"].mean()


def late_means(table: Table, curves: pd.DataFrame) -> Iterator[str]:
    """The table again, of these means: lines of Markdown."""
    lines = [["", *(part for column in table.columns for part in (column.label, "n"))]]
    lines[0] += [" − ".join(_label(table, name) for name in pair) for pair in table.difference]
    for row in table.rows:
        found = {column.name: late_values(table, curves, row, column) for column in table.columns}
        line = [row.label]
        for values in found.values():
            line += [table.measure.text(values.mean(), values.std()), str(len(values))]
        for first, second in table.difference:
            gaps = (found[first] - found[second]).dropna()
            line.append(table.measure.text(gaps.mean(), gaps.std(), sign="+"))
        lines.append(line)
    every = (
        f"Mean over the last {table.last_evaluations} evaluations of a run, which swings less than the last one alone"
    )
    yield from ("", f"{every} (mean ± standard deviation over seeds):", "", markdown_rows(lines))


def _label(table: Table, name: str) -> str:
    return next(column.label for column in table.columns if column.name == name)
