"""Accuracy against epsilon for each data set, ours beside the field's: what the picture of the README shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from dpbench.harness.reproduce._summary import spread, summary
from dpbench.harness.reproduce.tables import Table, Variant, read_table
from tools.results.choices import group_choice

OURS = "ours"
FIELD = "field"
OWN = "recipes/"
"""Of tables that reproduce no paper: what stands beside our figures there is the field's."""
ACCOUNTANT = "epsilon_rdp"
RDP = "RDP"

FEW = 2  # runs, which say nothing about their spread
_RESULTS = Path(__file__).parents[2] / "results"
_METRIC = "test/accuracy"
_GRID = "tune/grid"
_TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
_COLUMNS = [
    "data",
    "title",
    "unit",
    "source",
    "whose",
    "label",
    "method",
    "epsilon",
    "delta",
    "accountant",
    "value",
    "half",
    "n",
    "is_chosen",
    "beside",
]
METHODS = {
    "dpsgd": ("DP-SGD", "#3060a8"),
    "discretized": ("discretized gradients", "#e08020"),
    "adaptive_mean": ("adaptive mean clipping", "#508850"),
    "adaptive_quantile": ("adaptive quantile clipping", "#c04030"),
    "tuned": ("DP-SGD, tuning included in ε", "#8050a8"),
}
"""Strategy, or tuning → its name and color."""


def points(results: Mapping[str, tuple[Table, pd.DataFrame]]) -> pd.DataFrame:
    """List each private cell of ours on test data, and what others publish.

    Args:
        results: Tables with runs (as in runs.csv), by name.
    """
    lines = []
    for table, runs in results.values():
        if table.metric == _METRIC and table.name != _GRID:  # of whose cells the best were a choice
            lines += _ours(table, runs)
    frame = pd.DataFrame(lines + _tuned() + _field(), columns=_COLUMNS)
    # A cell may stand in several tables.
    return frame.drop_duplicates(["data", "source", "whose", "label", "epsilon", "value"])


def _ours(table: Table, runs: pd.DataFrame) -> list[dict[str, Any]]:
    lines = {line.name: line for line in (*table.rows, *table.columns)}
    deltas = runs.groupby(["row", "column"])["delta"].max()
    cells = summary(table, runs).dropna(subset=["unit", ACCOUNTANT, "mean"])
    entries = []
    for cell in cells.to_dict("records"):
        row = lines[cell["row"]]
        column = lines[cell["column"]]
        data = group_choice("data", table, row, column)
        if data not in _TITLES:
            continue
        entry = {
            "data": data,
            "title": _TITLES[data],
            "unit": cell["unit"],
            "source": table.source,
            "whose": OURS,
            "label": table.label_of(row, column),
            "method": group_choice("strategy", table, row, column) or "dpsgd",
            "epsilon": cell[ACCOUNTANT],
            "delta": deltas[row.name, column.name],
            "accountant": RDP,
            "value": cell["mean"],
            "half": cell["half"] if cell["n"] > FEW else None,
            "n": cell["n"],
            "is_chosen": _is_chosen_here(table, row, column, data),
        }
        entries.append(entry)
    return entries


def _tuned() -> list[dict[str, Any]]:
    """Tunings of results/tune, whose ε covers the choice."""
    file = _RESULTS / "tune" / "runs.csv"
    if not file.is_file():
        return []
    runs = pd.read_csv(file).groupby("row")
    figures: Any = 100 * spread(runs["accuracy"])
    table = read_table(_GRID)
    rows = {row.name: row for row in table.rows}
    entries = []
    for name, tunings in runs:
        data = group_choice("data", table, rows[str(name)], table.columns[0])
        if data not in _TITLES:
            continue
        entry = {
            "data": data,
            "title": _TITLES[data],
            "unit": "example",
            "source": table.source,
            "whose": OURS,
            "label": "dpbench tune, choosing included",
            "method": "tuned",
            "epsilon": tunings["epsilon_rdp"].max(),
            "delta": tunings["delta"].max(),
            "accountant": RDP,
            "value": figures.loc[name, "mean"],
            "half": figures.loc[name, "half"],
            "n": len(tunings),
            "is_chosen": data == "cifar10",  # its features were designed by looking at these images
        }
        entries.append(entry)
    return entries


def _field() -> list[dict[str, Any]]:
    """What others publish, who are no paper that is reproduced here."""
    entries = []
    for published in yaml.safe_load((_RESULTS / "field.yaml").read_text(encoding="utf-8")):
        entry = {
            "title": _TITLES[published["data"]],
            "unit": "example",
            "whose": published.get("whose", FIELD),
            "value": float(published["accuracy"]),
        }
        numbers = {"epsilon": float(published["epsilon"]), "delta": float(published["delta"])}
        entries.append({**published, **entry, **numbers})
    return entries


def _is_chosen_here(table: Table, row: Variant, column: Variant, data: str) -> bool:
    """Whether a cell's settings were chosen on the data set that it is trained on."""
    if not table.chosen_from:
        return table.name.startswith(OWN)
    tuning = read_table(table.chosen_from)
    chosen_on = group_choice("data", tuning, *tuning.cells[0])
    return table.chooses(row, column) and chosen_on == data
