"""A table of runs as figures and as text: means, intervals, differences and epsilons, from runs.csv alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reproduce._results import NOMINAL, of_best_trials
from dpbench.harness.reproduce.tables import Table
from dpbench.harness.runs.numbers import ABSENT, epsilon_text

EXAMPLE = "example"
"""The unit of privacy that needs no mention."""

_RDP = "epsilon_rdp"  # always shown; the others where there is one
_EPSILONS = {"epsilon_microbatch_rdp": "ε nominal (RDP)", _RDP: "ε (RDP)", "epsilon_pld": "ε (PLD)"}
LEVEL = 0.05
"""Of the tests of all differences of a table together."""

Columns = list[list[str]]
"""Columns of a table as text, each with its heading first."""


def summary(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """Describe each cell in a line.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv.

    Returns:
        A frame with row, column, n, mean, sd and half (of the 95 % interval), as they are shown; the largest of each
        epsilon, their unit (missing where the cell is not private), and the paper's figures (paper, paper_spread).
    """
    numbers = ["value", *_EPSILONS, NOMINAL]
    # Older runs.csv lack columns that came later, and no run at all has no columns.
    runs = runs.reindex(columns=["row", "column", "unit", *numbers])
    runs[numbers] = runs[numbers].apply(pd.to_numeric, errors="coerce").astype(float)
    runs["value"] *= table.measure.scale
    grouped = runs.groupby(["row", "column"])
    names = [[line.name for line in lines] for lines in (table.rows, table.columns)]
    cells = pd.MultiIndex.from_product(names, names=["row", "column"])
    frame = spread(grouped["value"]).join(grouped[numbers[1:]].max()).join(grouped["unit"].first()).reindex(cells)
    frame["n"] = frame["n"].fillna(0).astype(int)
    printed = [table.printed(row, column) for row, column in cells]
    frame[["paper", "paper_spread"]] = pd.DataFrame(printed, cells, dtype=float)
    return frame.reset_index()


def spread(groups: Any) -> pd.DataFrame:
    """Number, mean, standard deviation, and half the 95 % interval of the mean (Student's t), of grouped values."""
    frame: pd.DataFrame = groups.agg(n="count", mean="mean", sd="std")
    # Not scipy.stats, whose import takes as long as all else that `--status` does.
    return frame.assign(half=frame["sd"] * special.stdtrit(frame["n"] - 1, 0.975) / frame["n"] ** 0.5)


def differences(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """Compare pairs of columns over the seeds that both have.

    Returns:
        A frame with n, mean, sd and half of the paired difference for each pair and row (the index) that has one: half
        of the 95 % interval of its mean; p, of the test that it is zero; level, at which it is tested so that all
        together are at 5 % (Holm 1979); and holm, half of the interval at that level.
    """
    values = runs.pivot_table(index=["row", "seed"], columns="column", values="value")
    values = values.reindex(columns=[column.name for column in table.columns])
    gaps = {pair: (values[pair[0]] - values[pair[1]]).dropna() for pair in table.difference}
    frame = spread((pd.concat(gaps) * table.measure.scale).groupby(level=[0, 1, "row"]))
    degrees = frame["n"] - 1
    errors = frame["sd"] / frame["n"] ** 0.5
    frame["p"] = 2 * special.stdtr(degrees, -(frame["mean"].abs() / errors))
    p_values = frame["p"].sort_values()  # one run, which is no test, comes last
    levels = LEVEL / np.maximum(p_values.count() - np.arange(len(p_values)), 1)
    is_told = (p_values <= levels).to_numpy()
    # From the first on that is not told from zero, none is.
    last = 1.0 if is_told.all() else levels[is_told.argmin()]
    frame["level"] = pd.Series(np.minimum(levels, last), p_values.index)
    return frame.assign(holm=errors * special.stdtrit(degrees, 1 - frame["level"] / 2))


def cells(table: Table, runs: pd.DataFrame) -> list[list[str]]:
    """Lay the table out as text, headings first: for each column ours (mean ± standard deviation, n) and theirs."""
    runs = of_best_trials(table, runs)
    lines = summary(table, runs)
    columns = _figures(table, lines, ", ours")
    gaps = _gaps(table, runs, with_interval=True)
    if len(gaps) == 1:
        gaps[0][0] = "paired difference"
    columns += gaps
    claims = [row.epsilon for row in table.rows]
    if set(claims) != {None}:
        columns.append(["ε claimed", *(ABSENT if epsilon is None else f"{epsilon:g}" for epsilon in claims)])
    columns += _epsilons(table, lines)
    return [list(line) for line in zip(*columns, strict=True)]


def _figures(table: Table, lines: pd.DataFrame, ours: str = "") -> Columns:
    """Labels of the rows; of each column mean ± standard deviation and n, and where ours are marked, the paper's."""
    columns = [["", *(row.label for row in table.rows)]]
    for column in table.columns:
        part = lines[lines["column"] == column.name]
        columns.append([f"{column.label}{ours}", *map(table.measure.text, part["mean"], part["sd"])])
        columns.append(["n", *map(str, part["n"])])
        if ours and part["paper"].notna().any():
            printed = [table.measure.text(*pair, 1) for pair in zip(part["paper"], part["paper_spread"], strict=True)]
            columns.append([f"{column.label}, paper", *printed])
    return columns


def _gaps(table: Table, runs: pd.DataFrame, with_interval: bool) -> Columns:
    """A column for each pair that is compared: with half the interval of its mean, or else its standard deviation."""
    text = table.measure.text
    labels = {column.name: column.label for column in table.columns}
    compared = differences(table, runs) if table.difference and len(runs) else pd.DataFrame()
    columns = []
    for pair in table.difference:
        texts = [" − ".join(labels[name] for name in pair)]
        for row in table.rows:
            if (*pair, row.name) not in compared.index:
                texts.append(ABSENT)
                continue
            gap: Any = compared.xs((*pair, row.name))
            if not with_interval:
                texts.append(text(gap["mean"], gap["sd"], sign="+"))
                continue
            together = f", Holm ± {text(gap['holm'])}" if len(compared) > 1 else ""
            interval = f" [± {text(gap['half'])}{together}]" if gap["n"] > 1 else ""
            texts.append(text(gap["mean"], sign="+") + interval)
        columns.append(texts)
    return columns


def _epsilons(table: Table, lines: pd.DataFrame) -> Columns:
    """Epsilons that some cell has, with the unit in the heading unless that is an example."""
    private = lines.dropna(subset="unit")
    units = sorted(private["unit"].unique())
    unit = f", unit: {units[0]}" if len(units) == 1 and units != [EXAMPLE] else ""
    has = private[list(_EPSILONS)].notna().any()
    # Where RDP covers nothing, a column of dashes says that PLD does not either.
    has["epsilon_pld"] |= not has[_RDP]
    has[_RDP] = True
    headings = {name: label.replace(")", f"{unit})") for name, label in _EPSILONS.items() if has[name]}
    if table.nominal is not None:
        record = units[0] if units else "record"
        headings[NOMINAL] = f"ε nominal at {table.nominal.population:,} {record}s (RDP)"
    columns = []
    for name, heading in headings.items():
        texts = [heading]
        for row in table.rows:
            part = private[private["row"] == row.name]
            epsilons = list(map(epsilon_text, part[name]))
            if len(units) > 1:
                epsilons = [f"{text} ({unit})" for text, unit in zip(epsilons, part["unit"], strict=True)]
            # One figure, or one for each private cell of a row where they differ.
            texts.append(" / ".join(epsilons if len(set(epsilons)) > 1 else epsilons[:1]) or ABSENT)
        columns.append(texts)
    return columns


def late_means(table: Table, curves: pd.DataFrame) -> str:
    """The table again, of means over the last evaluations of each run, where accuracy swings from one to the next.

    Args:
        table: The definition, which says over how many.
        curves: Logged values of the runs: columns row, column, seed, step, value.
    """
    run = ["row", "column", "seed"]
    curves = curves.sort_values([*run, "step"])
    change = curves.groupby(run)[["step", "value"]].diff()
    # The test after step S is of the same weights as the validation that is logged at S − 1.
    is_repeated = (change["step"] == 1) & (change["value"] == 0)
    last = curves[~is_repeated].groupby(run).tail(table.last_evaluations)
    runs = last.groupby(run)["value"].mean().reset_index()
    columns = _figures(table, summary(table, runs)) + _gaps(table, runs, with_interval=False)
    return markdown_rows(list(zip(*columns, strict=True)))
