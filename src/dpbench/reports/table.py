"""`dpbench table`: finished runs side by side, with the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.reports.markdown import markdown_rows
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.record import is_audited, read_result

_ACCURACIES = {
    "val/accuracy": "validation accuracy (%)",
    "test/accuracy": "test accuracy (%)",
    "evaluation/accuracy_cnn": "accuracy of a CNN on synthetic images (%)",
}
_MEASURED = ("val/", "test/")  # on data that are not the training data
UNPROVEN = "ledger not intact"  # beside an epsilon that nobody should rely on
_HIDDEN = ("run.", "logger.", "launcher", "data.root", "data.download", "strategy.secure")


def collect(folders: Sequence[Path]) -> pd.DataFrame:
    """One line for each finished run below some folders.

    Args:
        folders: Run folders, or folders of sweeps.

    Returns:
        Columns: run, the settings in which the runs differ, accuracy (of other tasks what was measured on validation
        and test data; nothing of a model that learned from the canaries of an audit, which a column says), the unit of
        privacy where one is no example, epsilon by each accountant (infinite without privacy), seconds per step, steps;
        `ledger` if one is not intact.

    Raises:
        ConfigurationError: There is no finished run in one of the folders.
    """
    for folder in folders:  # each: one that is mistyped is not left out
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is {'a file' if folder.exists() else 'not there'}: name a folder.")
        if not finished_runs_below([folder]):
            raise ConfigurationError(f"no finished run (with a {RunFolder.result}) below {folder}.")
    runs = finished_runs_below(folders)
    records = [read_result(run) for run in runs]
    settings = pd.DataFrame([flat_settings(record["config"]) for record in records])
    # An option that only some strategies have differs if those runs differ in it.
    differing = [str(column) for column in settings if settings[column].dropna().astype(str).nunique() > 1]
    named = {column: column.removesuffix("._target_") for column in differing}
    table = settings[differing].rename(columns=named).astype(object)
    table = table.where(table.notna(), "–")
    table.insert(0, "run", [record["config"]["run"]["name"] for record in records])
    audited = [is_audited(record) for record in records]
    measured = [{} if one else record["metrics"] for one, record in zip(audited, records, strict=True)]
    for name, label in _ACCURACIES.items():
        values = [metrics.get(name) for metrics in measured]
        if any(value is not None for value in values):
            table[label] = [100 * (float("nan") if value is None else value) for value in values]
    if not set(_ACCURACIES.values()) & set(table):  # no classifiers
        names = {name for metrics in measured for name in metrics if name.startswith(_MEASURED)}
        for name in sorted(names, reverse=True):
            table[name] = [metrics.get(name) for metrics in measured]
    if any(audited):
        table["learned from canaries"] = ["yes" if one else "–" for one in audited]
    if any(record.get("judged_on") == "val" for record in records):
        table["images judged on"] = [record.get("judged_on", "–") for record in records]
    units = [record["privacy"].get("unit") or "–" for record in records]
    if set(units) - {"example", "–"}:
        table["unit"] = units
    for name in sorted({name for record in records for name in record["privacy"]["epsilon"]}, reverse=True):
        table[f"epsilon ({name.upper()})"] = [_epsilon(record["privacy"], name) for record in records]
    if any("damage" in record["privacy"] for record in records):
        table["ledger"] = [record["privacy"].get("damage", "intact") for record in records]
    table["ms per step"] = [1000 * record["seconds"] / max(record["steps"], 1) for record in records]
    table["steps"] = [record["steps"] for record in records]
    return table


def _epsilon(privacy: dict[str, Any], accountant: str) -> float:
    """Infinite without privacy, not a number where the accountant shows none."""
    value = privacy["epsilon"].get(accountant)
    return value if value is not None else float("inf") if privacy.get("unit") is None else float("nan")


def flat_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration as dotted keys, without what cannot change a result."""
    if not isinstance(config, dict) or not config:
        return {} if prefix.startswith(_HIDDEN) else {prefix.removesuffix("."): _short(config)}
    parts = [flat_settings(value, f"{prefix}{key}.") for key, value in config.items()]
    return {key: value for part in parts for key, value in part.items()}


def _short(value: Any) -> Any:
    return value.rpartition(".")[2] if isinstance(value, str) and value.startswith(("dpbench.", "torch.")) else value


def markdown(table: pd.DataFrame) -> str:
    """The table in Markdown, numbers rounded."""
    digits = {**dict.fromkeys(_ACCURACIES.values(), ".2f"), "ms per step": ".1f", "steps": ".0f"}
    lines = [list(map(str, table.columns))]
    for _, row in table.iterrows():
        cells = []
        for column, value in row.items():
            of_privacy = str(column).startswith("epsilon")
            measured = ".4g" if str(column).startswith(_MEASURED) else ""
            form = digits.get(str(column), ".3f" if of_privacy else measured)
            absent = pd.api.types.is_scalar(value) and pd.isna(value)  # options may be lists
            cell = "–" if absent else format(value, form) if form else str(value)
            cells.append(f"{cell} ({UNPROVEN})" if of_privacy and row.get("ledger", "intact") != "intact" else cell)
        lines.append(cells)
    return markdown_rows(lines)
