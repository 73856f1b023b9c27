"""Accuracy against epsilon for each data set, ours beside the field's: what the picture of the README shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from dpbench.harness.reproduce._summary import summary
from dpbench.harness.reproduce.tables import Table, Variant, read_table
from tools.results.choices import group_choice

OURS = "ours"
FIELD = "field"
OWN = "recipes/"
"""Of tables that reproduce no paper: what stands beside our figures there is the field's."""
ACCOUNTANT = "epsilon_rdp"
RDP = "RDP"

_NOISE = ("random_noise", "user_noise")  # of whose test data nothing can be learned
FEW = 2  # runs, which say nothing about their spread
_TITLES = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "digits": "digits",
    "mnist_writers": "MNIST by writer",
    "stackexchange_tags": "tags of beer.stackexchange, by user",
}
_COLUMNS = [
    "data",
    "title",
    "unit",
    "metric",
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
}
"""Strategy → its name and color."""


def points(results: Mapping[str, tuple[Table, pd.DataFrame]]) -> pd.DataFrame:
    """List each private cell of ours on test data, and what others publish.

    Panels (data set and metric) with one private result of ours, or one epsilon, are left out.

    Args:
        results: Tables with runs (as in runs.csv), by name.
    """
    lines = []
    for table, runs in results.values():
        lines += _ours(table, runs)
    frame = pd.DataFrame(lines + _field(), columns=_COLUMNS)
    # A cell may stand in several tables.
    frame = frame.drop_duplicates(["data", "source", "whose", "label", "epsilon", "value"])
    frame = frame.groupby(["data", "metric"]).filter(_has_several_epsilons)
    order = [*_TITLES, *sorted(set(frame["data"]) - set(_TITLES))]
    frame = frame.assign(place=frame["data"].map(order.index))
    return frame.sort_values(["place", "metric"], kind="stable", ignore_index=True).drop(columns="place")


def _has_several_epsilons(panel: pd.DataFrame) -> bool:
    return panel.loc[panel["whose"] == OURS, "epsilon"].round(2).nunique() > 1


def _ours(table: Table, runs: pd.DataFrame) -> list[dict[str, Any]]:
    if not table.metric.startswith("test/"):
        return []
    lines = {line.name: line for line in (*table.rows, *table.columns)}
    deltas = runs.groupby(["row", "column"])["delta"].max()
    cells = summary(table, runs).dropna(subset=["unit", ACCOUNTANT, "mean"])
    entries = []
    for cell in cells.to_dict("records"):
        row = lines[cell["row"]]
        column = lines[cell["column"]]
        entry = _entry(table, row, column)
        if entry["data"] in _NOISE:
            continue
        entry |= {
            "unit": cell["unit"],
            "whose": OURS,
            "epsilon": cell[ACCOUNTANT],
            "delta": deltas[row.name, column.name],
            "accountant": RDP,
            "value": cell["mean"],
            "half": cell["half"] if cell["n"] > FEW else None,
            "n": cell["n"],
        }
        entries.append(entry)
    return entries


def _field() -> list[dict[str, Any]]:
    """What others publish, who are no paper that is reproduced here."""
    entries = []
    for published in yaml.safe_load((Path(__file__).parents[2] / "results" / "field.yaml").read_text(encoding="utf-8")):
        entry = {
            "title": _TITLES[published["data"]],
            "unit": "example",
            "metric": "test/accuracy",
            "whose": published.get("whose", FIELD),
            "value": float(published["accuracy"]),
        }
        numbers = {"epsilon": float(published["epsilon"]), "delta": float(published["delta"])}
        entries.append({**published, **entry, **numbers})
    return entries


def _entry(table: Table, row: Variant, column: Variant) -> dict[str, Any]:
    """What a cell is, without its figures."""
    data = group_choice("data", table, row, column) or "digits"
    method = group_choice("strategy", table, row, column) or "dpsgd"
    return {
        "data": data,
        "title": _TITLES.get(data, data),
        "metric": table.metric,
        "source": table.source,
        "label": table.label_of(row, column),
        "method": method,
        "is_chosen": _is_chosen_here(table, row, column, data),
    }


def _is_chosen_here(table: Table, row: Variant, column: Variant, data: str) -> bool:
    """Whether a cell's settings were chosen on the data set that it is trained on."""
    if not table.chosen_from:
        return table.name.startswith(OWN)
    tuning = read_table(table.chosen_from)
    chosen_on = group_choice("data", tuning, *tuning.cells[0]) or "digits"
    return table.chooses(row, column) and chosen_on == data
