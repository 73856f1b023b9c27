"""`dpbench table`: finished runs side by side, with the settings in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.reports.audited import LABEL, MEASURED, audited_epsilon, verdict_of, without_accuracy
from dpbench.reports.markdown import markdown_rows
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.record import UNPROVEN, accusation, is_audited, read_result

ACCURACIES = {
    "val/accuracy": "validation accuracy (%)",
    "test/accuracy": "test accuracy (%)",
    "evaluation/accuracy_cnn": "accuracy of a CNN on synthetic images (%)",
}
CANARIES, JUDGED = "learned from canaries", "images judged on"
_HIDDEN = ("run.", "logger.", "launcher", "data.root", "data.download", "strategy.secure")


def collect(folders: Sequence[Path], with_folder: bool = False) -> pd.DataFrame:
    """One line for each finished run below some folders.

    Args:
        folders: Run folders, or folders of sweeps.
        with_folder: Whether a column says where each run lies.

    Returns:
        Columns: run, the settings in which the runs differ, accuracy (of other tasks what was measured on validation
        and test data; nothing of a model that learned from the canaries of an audit, which a column says), the unit of
        privacy where one is no example, epsilon by each accountant (infinite without privacy), seconds per step, steps;
        where a run was audited, `audited epsilon (95 %)` and `verdict`; `ledger` if one is not intact.

    Raises:
        ConfigurationError: There is no finished run in one of the folders.
    """
    runs = read_runs(folders)
    records = list(runs.values())
    settings = pd.DataFrame([flat_settings(record["config"]) for record in records])
    # An option that only some strategies have differs if those runs differ in it.
    differing = [str(column) for column in settings if settings[column].dropna().astype(str).nunique() > 1]
    named = {column: column.removesuffix("._target_") for column in differing}
    table = settings[differing].rename(columns=named).astype(object)
    table = table.where(table.notna(), "–")
    table.insert(0, "run", [record["config"]["run"]["name"] for record in records])
    if with_folder:
        table.insert(1, "folder", list(map(str, runs)))
    return pd.concat([table, outcomes(records)], axis=1)


def read_runs(folders: Sequence[Path]) -> dict[RunFolder, dict[str, Any]]:
    """Records of all finished runs below some folders.

    Args:
        folders: Run folders, or folders of sweeps.

    Raises:
        ConfigurationError: There is no finished run in one of the folders.
    """
    for folder in folders:  # each: one that is mistyped is not left out
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is {'a file' if folder.exists() else 'not there'}: name a folder.")
        if not finished_runs_below([folder]):
            raise ConfigurationError(f"no finished run (with a {RunFolder.result}) below {folder}.")
    return {run: read_result(run) for run in finished_runs_below(folders)}


def outcomes(records: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """What came out of runs: a line for each, with the columns that `collect` names behind the settings."""
    table = pd.DataFrame(index=range(len(records)))
    audited = [is_audited(record) for record in records]
    measured = [without_accuracy(record) for record in records]
    for name, label in ACCURACIES.items():
        values = [metrics.get(name) for metrics in measured]
        if any(value is not None for value in values):
            table[label] = [100 * (float("nan") if value is None else value) for value in values]
    if not set(ACCURACIES.values()) & set(table):  # no classifiers
        names = {name for metrics in measured for name in metrics if name.startswith(MEASURED)}
        for name in sorted(names, reverse=True):
            table[name] = [metrics.get(name) for metrics in measured]
    for name in sorted(
        {str(record["config"].get("objective") or "") for record in records} - {"", *ACCURACIES, *table}
    ):
        table[name] = [metrics.get(name) for metrics in measured]
    if any(audited):
        table[CANARIES] = ["yes" if one else "–" for one in audited]
    if any(record.get("judged_on") == "val" for record in records):
        table[JUDGED] = [record.get("judged_on", "–") for record in records]
    for name, values in _privacy_columns([record["privacy"] for record in records]):
        table[name] = values
    table["ms per step"] = [1000 * record["seconds"] / max(record["steps"], 1) for record in records]
    table["steps"] = [record["steps"] for record in records]
    return table


def _privacy_columns(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """What runs guarantee, and what their audits and ledgers say of it."""
    units = [privacy.get("unit") or "–" for privacy in found]
    if set(units) - {"example", "–"}:
        yield "unit", units
    for name in sorted({name for privacy in found for name in privacy["epsilon"]}, reverse=True):
        yield f"epsilon ({name.upper()})", [_epsilon(privacy, name) for privacy in found]
    if any("audit" in privacy for privacy in found):
        yield LABEL, [audited_epsilon(privacy) for privacy in found]
        yield "verdict", [verdict_of(privacy) or "–" for privacy in found]
    if any("damage" in privacy for privacy in found):
        yield "ledger", [privacy.get("damage", "intact") for privacy in found]


def _epsilon(privacy: dict[str, Any], accountant: str) -> float:
    """Infinite without privacy, not a number where the accountant shows none."""
    value = privacy["epsilon"].get(accountant)
    return value if value is not None else float("inf") if privacy.get("unit") is None else float("nan")


def flat_settings(config: Any, prefix: str = "", hidden: tuple[str, ...] = _HIDDEN) -> dict[str, Any]:
    """A configuration as dotted keys, without what cannot change a result (or begins otherwise with `hidden`)."""
    if not isinstance(config, dict) or not config:
        return {} if prefix.startswith(hidden) else {prefix.removesuffix("."): _short(config)}
    parts = [flat_settings(value, f"{prefix}{key}.", hidden) for key, value in config.items()]
    return {key: value for part in parts for key, value in part.items()}


def _short(value: Any) -> Any:
    return value.rpartition(".")[2] if isinstance(value, str) and value.startswith(("dpbench.", "torch.")) else value


def markdown(table: pd.DataFrame) -> str:
    """The table in Markdown, numbers rounded."""
    digits = {**dict.fromkeys(ACCURACIES.values(), ".2f"), LABEL: ".3f", "ms per step": ".1f", "steps": ".0f"}
    lines = [list(map(str, table.columns))]
    for _, row in table.iterrows():
        cells, mark = [], doubt_in(row)
        for column, value in row.items():
            of_privacy = str(column).startswith("epsilon")
            measured = ".4g" if str(column).startswith((*MEASURED, "private/")) else ""
            form = digits.get(str(column), ".3f" if of_privacy else measured)
            absent = pd.api.types.is_scalar(value) and pd.isna(value)  # options may be lists
            cell = "–" if absent else format(value, form) if form else str(value)
            cells.append(f"{cell} ({mark})" if of_privacy and mark is not None else cell)
        lines.append(cells)
    return markdown_rows(lines)


def doubt_in(row: pd.Series[Any]) -> str | None:
    """What stands beside each epsilon of a line of `outcomes`."""
    if row.get("ledger", "intact") != "intact":
        return UNPROVEN
    return accusation(row.get("verdict"))
