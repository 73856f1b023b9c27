"""A table of runs as figures and as text: means, intervals, differences and epsilons, from runs.csv alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special

from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reproduce._results import NOMINAL, of_best_trials
from dpbench.harness.reproduce.tables import Table
from dpbench.harness.runs.numbers import ABSENT, epsilon_text

EXAMPLE = "example"
"""The unit of privacy that needs no mention."""

_EPSILONS = {
    "epsilon_microbatch_rdp": "ε nominal (RDP)",
    "epsilon_rdp": "ε (RDP)",
    "epsilon_pld": "ε (PLD)",
}
_ALWAYS = "epsilon_rdp"  # shown; the others where there is one
_FIGURES = [*_EPSILONS, NOMINAL, "seconds", "value"]
_LEVEL = 0.05
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
        epsilon, their unit, whether the cell is private, mean seconds, and the paper's figures (paper, paper_spread).
    """
    # Older runs.csv lack columns that came later, and no run at all has no columns.
    runs = runs.reindex(columns=["row", "column", "unit", *_FIGURES])
    runs["value"] = runs["value"].astype(float) * table.measure.scale
    cells = [[row.name for row in table.rows], [column.name for column in table.columns]]
    lines = pd.MultiIndex.from_product(cells, names=["row", "column"])
    numbers = runs[_FIGURES].apply(pd.to_numeric, errors="coerce").astype(float)
    figures = numbers.groupby([runs["row"], runs["column"]]).agg(["count", "mean", "std", "max"]).reindex(lines)
    values: pd.DataFrame = figures["value"]
    frame = _with_interval(values[["count", "mean", "std"]])
    frame["n"] = frame["n"].fillna(0).astype(int)
    for name in (*_EPSILONS, NOMINAL):
        frame[name] = figures[name, "max"]
    frame["unit"] = runs.groupby(["row", "column"])["unit"].first()
    frame["private"] = frame["unit"].notna()
    frame["seconds"] = figures["seconds", "mean"]
    printed = [table.printed(row, column) for row, column in lines]
    frame[["paper", "paper_spread"]] = pd.DataFrame(printed, frame.index, dtype=float)
    return frame.reset_index()


def _with_interval(spread: pd.DataFrame) -> pd.DataFrame:
    """Number, mean, standard deviation, and half the 95 % interval of the mean (Student's t).

    Args:
        spread: Columns count, mean and std.
    """
    frame = spread.set_axis(["n", "mean", "sd"], axis=1)
    # Not scipy.stats, whose import takes as long as all else that `--status` does.
    quantile = special.stdtrit(frame["n"] - 1, 0.975)
    return frame.assign(half=frame["sd"] * quantile / frame["n"] ** 0.5)


def differences(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """Compare pairs of columns over the seeds that both have.

    Returns:
        A frame with n, mean, sd and half of the paired difference for each pair and row (the index) that has one: half
        of the 95 % interval of its mean, and holm, half of the interval by which all are told from zero together (Holm
        1979).
    """
    values = runs.pivot_table(index=["row", "seed"], columns="column", values="value")
    values = values.reindex(columns=[column.name for column in table.columns])
    spreads = {}
    for first, second in table.difference:
        gaps = (values[first] - values[second]).dropna() * table.measure.scale
        spreads[first, second] = gaps.groupby("row").agg(["count", "mean", "std"])
    frame = _with_interval(pd.concat(spreads))
    degrees = frame["n"] - 1
    errors = frame["sd"] / frame["n"] ** 0.5
    p_values = 2 * special.stdtr(degrees, -(frame["mean"].abs() / errors))
    levels = _holm_levels(p_values.to_numpy())
    return frame.assign(holm=errors * special.stdtrit(degrees, 1 - levels / 2))


def _holm_levels(p_values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Level at which each of several differences is tested, so that all together are at 5 %; NaN is no test."""
    tests = np.isfinite(p_values).sum()
    order = np.argsort(p_values)
    steps = _LEVEL / np.maximum(tests - np.arange(len(order)), 1)
    is_kept = ~(p_values[order] <= steps)
    levels = np.empty(len(order))
    # From the first on that is not told from zero, none is.
    levels[order] = np.minimum(steps, steps[is_kept.argmax()] if is_kept.any() else 1)
    return levels


def cells(table: Table, runs: pd.DataFrame) -> list[list[str]]:
    """Lay the table out as text, headings first: for each column ours (mean ± standard deviation, n) and theirs."""
    runs = of_best_trials(table, runs)
    lines = summary(table, runs)
    columns: Columns = [["", *(row.label for row in table.rows)]]
    for column in table.columns:
        part = lines[lines["column"] == column.name]
        columns += _means(table, part, f"{column.label}, ours")
        if part["paper"].notna().any():
            printed = _texts(table, part["paper"], part["paper_spread"], digits=1)
            columns.append([f"{column.label}, paper", *printed])
    gaps = _gaps(table, runs, with_interval=True)
    if len(gaps) == 1:
        gaps[0][0] = "paired difference"
    columns += gaps
    claims = [row.epsilon for row in table.rows]
    if any(epsilon is not None for epsilon in claims):
        texts = [ABSENT if epsilon is None else f"{epsilon:g}" for epsilon in claims]
        columns.append(["ε claimed", *texts])
    columns += _epsilons(table, lines)
    return [list(line) for line in zip(*columns, strict=True)]


def _means(table: Table, part: pd.DataFrame, heading: str) -> Columns:
    """Two columns: mean ± standard deviation, and n, of a column's cells."""
    return [
        [heading, *_texts(table, part["mean"], part["sd"])],
        ["n", *part["n"].astype(str)],
    ]


def _texts(table: Table, means: pd.Series[Any], spreads: pd.Series[Any], digits: int = 2) -> list[str]:
    return [table.measure.text(mean, spread, digits) for mean, spread in zip(means, spreads, strict=True)]


def _gaps(table: Table, runs: pd.DataFrame, with_interval: bool) -> Columns:
    """A column for each pair that is compared: with half the interval of its mean, or else its standard deviation."""
    text = table.measure.text
    labels = {column.name: column.label for column in table.columns}
    compared = differences(table, runs) if table.difference and len(runs) else pd.DataFrame()
    columns = []
    for first, second in table.difference:
        texts = [f"{labels.get(first, first)} − {labels.get(second, second)}"]
        for row in table.rows:
            if (first, second, row.name) not in compared.index:
                texts.append(ABSENT)
                continue
            gap = compared.loc[[(first, second, row.name)]].iloc[0]
            if not with_interval:
                texts.append(text(gap["mean"], gap["sd"], sign="+"))
                continue
            together = f", Holm ± {text(gap['holm'])}" if len(compared) > 1 else ""
            interval = "" if pd.isna(gap["half"]) else f" [± {text(gap['half'])}{together}]"
            texts.append(text(gap["mean"], sign="+") + interval)
        columns.append(texts)
    return columns


def _epsilons(table: Table, lines: pd.DataFrame) -> Columns:
    """Epsilons that some cell has, with the unit in the heading unless that is an example."""
    private = lines[lines["private"]]
    units = sorted(set(private["unit"]))
    unit = f", unit: {units[0]}" if len(units) == 1 and units != [EXAMPLE] else ""
    has = private[list(_EPSILONS)].notna().any()
    # Where RDP covers nothing, a column of dashes says that PLD does not either.
    has["epsilon_pld"] |= not has[_ALWAYS]
    has[_ALWAYS] = True
    headings = {}
    for name, label in _EPSILONS.items():
        if has[name]:
            headings[name] = label.replace(")", f"{unit})")
    if table.nominal is not None:
        record = units[0] if units else "record"
        headings[NOMINAL] = f"ε nominal at {table.nominal.population:,} {record}s (RDP)"
    columns = []
    for name, heading in headings.items():
        texts = []
        for row in table.rows:
            part = private[private["row"] == row.name]
            texts.append(_epsilons_of_row(part[[name, "unit"]], with_unit=len(units) > 1))
        columns.append([heading, *texts])
    return columns


def _epsilons_of_row(part: pd.DataFrame, with_unit: bool) -> str:
    """One figure, or one for each private cell of a row where they differ."""
    texts = []
    for epsilon, unit in part.itertuples(index=False):
        text = epsilon_text(epsilon)
        texts.append(f"{text} ({unit})" if with_unit else text)
    if len(set(texts)) == 1:
        return texts[0]
    return " / ".join(texts) or ABSENT


def late_runs(table: Table, curves: pd.DataFrame) -> pd.DataFrame:
    """Mean over the last evaluations of each run: columns row, column, seed and value.

    Args:
        table: The definition, which says over how many.
        curves: What the runs logged: columns row, column, seed, step, value.
    """
    run = ["row", "column", "seed"]
    curves = curves.sort_values([*run, "step"])
    change = curves.groupby(run)[["step", "value"]].diff()
    # The test after step S is of the same weights as the validation that is logged at S − 1.
    is_repeated = (change["step"] == 1) & (change["value"] == 0)
    last = curves[~is_repeated].groupby(run).tail(table.last_evaluations)
    return last.groupby(run)["value"].mean().reset_index()


def late_means(table: Table, curves: pd.DataFrame) -> str:
    """The table again, of means over the last evaluations, where accuracy swings from one to the next.

    Args:
        table: The definition.
        curves: As for `late_runs`.
    """
    runs = late_runs(table, curves)
    lines = summary(table, runs)
    columns: Columns = [["", *(row.label for row in table.rows)]]
    for column in table.columns:
        columns += _means(table, lines[lines["column"] == column.name], column.label)
    columns += _gaps(table, runs, with_interval=False)
    return markdown_rows(list(zip(*columns, strict=True)))
