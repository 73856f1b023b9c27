"""What is chosen on validation data: the best trial of a cell, and the best cells of a tuning table for another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.reproduce.tables import ONLY, Table, Variant, read_table, select_cell
from dpbench.runs.readers import read_csv

RUNS = "runs.csv"
TRIAL = "trial"
"""Column of runs.csv, of tables with trials."""


def trials_of(runs: pd.DataFrame) -> pd.Series[str]:
    """Name of each run's trial, empty where its table has none."""
    return runs[TRIAL].fillna("").astype(str) if TRIAL in runs else pd.Series("", index=runs.index, dtype=object)


def best_trials(table: Table, runs: pd.DataFrame) -> dict[tuple[str, str], tuple[Variant, int]]:
    """(row, column) → the trial with the best mean over its seeds, and how many trials have runs.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv. Cells without runs have no best trial.
    """
    found = {}
    if table.trials == (ONLY,) or not len(runs):
        return {}
    for row in table.rows:
        for column in table.columns:
            own = select_cell(runs, row, column)
            means = own["value"].groupby(trials_of(own)).mean().dropna()
            if len(means):
                name = means.idxmin() if table.measure.lower_is_better else means.idxmax()
                found[row.name, column.name] = next(one for one in table.trials if one.name == name), len(means)
    return found


def of_best_trials(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that a table shows: those of the best trial of each cell."""
    best = best_trials(table, runs)
    if not best:
        return runs
    shown = {(row, column, trial.name) for (row, column), (trial, _) in best.items()}
    cells = zip(runs["row"], runs["column"], trials_of(runs), strict=True)
    return runs[[cell in shown for cell in cells]]


def with_choices(table: Table, conf: Path, results: Path) -> Table:
    """Give the cells of a table the words that did best in its tuning table.

    Args:
        table: The definition; returned as it is unless it has a `chosen_from`.
        conf: The configuration's folder.
        results: Where tables are kept, the tuning table's among them.

    Raises:
        ConfigurationError: Not all trials among which a cell chooses are finished, or the tuning table has runs of the
            seeds of this one.
    """
    if not table.chosen_from:
        return table
    tuning = read_table(table.chosen_from, conf)
    if not tuning.metric.startswith("val/"):
        raise ConfigurationError(f"{table.name} chooses from {tuning.name}, whose {tuning.metric} is no validation.")
    if shared := set(table.seeds) & set(tuning.seeds):
        raise ConfigurationError(f"{table.name} and {tuning.name}, where it chooses, share the seeds {sorted(shared)}.")
    path = results / tuning.folder / RUNS
    first = f"run it first (dpbench reproduce {tuning.command})"
    if not path.is_file():
        raise ConfigurationError(
            f"{table.name} chooses its settings from {tuning.name}, and there is no {path}: {first}."
        )
    names = ("row", "column", TRIAL)
    runs = read_csv(path, ["row", "column", "seed", "value"], "restore {path}, or make it again", (*names, "*"))
    cells = {}
    for row in table.rows:
        for column in table.columns:
            candidates = _candidates(table, tuning, row, column)
            means = {key: _mean(tuning, runs, *key) for key in candidates}
            if missing := [key for key, mean in means.items() if pd.isna(mean)]:
                one = ", ".join(line.label for line in missing[0] if line.label)
                raise ConfigurationError(
                    f"{table.name} chooses {row.label}, {column.label} among {len(means)} trials of {tuning.name}, of "
                    f"which {len(missing)} are not finished in {path} (such as {one}): {first}."
                )
            key = (min if tuning.measure.lower_is_better else max)(means, key=lambda key: means[key])
            label = ", ".join(line.label for line in key if line.label)
            cells[row.name, column.name] = Variant("chosen", label, tuple(word for line in key for word in line.words))
    return replace(table, choices=cells)


Key = tuple[Variant, Variant, Variant]  # row, column and trial of a tuning table


def _candidates(table: Table, tuning: Table, row: Variant, column: Variant) -> list[Key]:
    """What a cell chooses among: cells of the tuning table that its row or its column names, with every trial."""
    rows = _named(table, tuning, tuning.rows, row.chosen.rows + column.chosen.rows)
    columns = _named(table, tuning, tuning.columns, row.chosen.columns + column.chosen.columns)
    return [(one, other, trial) for one in rows for other in columns for trial in tuning.trials]


def _named(table: Table, tuning: Table, lines: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Rows or columns of the tuning table; all of them where none is named."""
    known: Mapping[str, Variant] = {line.name: line for line in lines}
    if strange := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"{table.name} chooses from {tuning.name}, which has no {strange[0]!r}; known: {', '.join(known)}."
        )
    return [known[name] for name in names] or list(lines)


def _mean(tuning: Table, runs: pd.DataFrame, row: Variant, column: Variant, trial: Variant) -> float:
    """Mean over the tuning table's seeds; not a number where one is missing."""
    own = select_cell(runs, row, column)
    own = own[trials_of(own) == trial.name]
    values = own.set_index("seed")["value"].reindex(list(tuning.seeds))
    return float(values.mean(skipna=False))
