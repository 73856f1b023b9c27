"""Rows of a table of runs: single runs, and means of several."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.harness.runs.command import choices_of
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.numbers import ABSENT
from dpbench.harness.runs.readers import read_metrics
from dpbench.harness.runs.record import (
    audited_epsilon,
    doubt,
    is_audited,
    read_result,
    verdict_of,
    without_accuracy,
)

AUDITED = "privacy/audited_epsilon"
TIME = "ms per step"
STEPS = "steps"
CODE = "code_hash"
UNIT = "unit of privacy"
OWN_CODE = "code of "
"""Prefix of the settings with source hashes of packages other than dpbench."""
MISSING = object()
"""Value of a key that a run does not have; None is a value."""

_HIDDEN = ("run.", "logger.", "launcher", "data.root", "data.download", "strategy.secure")  # cannot change a result


@dataclass(frozen=True)
class RunRow:
    """One run, or the mean of several.

    Attributes:
        name: Name of the run, with its doubts.
        settings: Its configuration by dotted keys, its unit of privacy, and a hash of each package that is not ours.
        metrics: Final figures; None where one is missing.
        curves: Logged metrics, by step; empty unless asked for.
        record: Content of result.json; of a mean that of its first run.
        folder: Folder of the run; of a mean that of its first run.
        words: Column of a table → text: canaries, unit of privacy, verdict of its audit, state of its ledger.
        note: Note to be shown with it.
        n: Number of runs of which it is the mean.
        deviations: Standard deviations of metrics over them.
        bands: The same of curves.
    """

    name: str
    settings: Mapping[str, Any]
    metrics: Mapping[str, float | None]
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    record: Mapping[str, Any] = field(default_factory=dict)
    folder: RunFolder | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None
    n: int = 1
    deviations: Mapping[str, float] = field(default_factory=dict)
    bands: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def choices(self) -> dict[str, str]:
        """Group of the configuration → name of the file that was chosen, such as strategy → dpsgd."""
        return {} if self.folder is None else choices_of(self.folder)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The metrics by which a sweep chose."""
        named = self.record["config"].get("objective") or ()
        return (named,) if isinstance(named, str) else tuple(named)

    @property
    def private(self) -> bool:
        """True if the run claims an ε."""
        return (self.record.get("privacy") or {}).get("delta") is not None

    def lookup(self, key: str) -> Any:
        """The value of a dotted key, or of a group the name of its file; `MISSING` where the run has none."""
        if key in self.choices:
            return self.choices[key]
        value: Any = self.record["config"]
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return MISSING
            value = value[part]
        if isinstance(value, dict):  # a group, of a run that Hydra did not make
            return str(value.get("_target_", ABSENT)).rpartition(".")[2]
        return value


def seed_keys(rows: Sequence[RunRow]) -> set[str]:
    """The seed, and keys that take its value.

    Another seed among the settings (of the allocation of a data set, say) is equal to that of some run by chance, and
    not to those of all.
    """
    follow = set()
    for key in keys_of_any(row.settings for row in rows):
        seeds = [(row.settings[key], row.settings.get("seed")) for row in rows if key in row.settings]
        if "seed" in key.rpartition(".")[2] and all(own == seed for own, seed in seeds):
            follow.add(key)
    return follow


def without_seeds(rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Settings of runs without those of `seed_keys`, and without the unit, which is not a setting."""
    left_out = {*seed_keys(rows), UNIT}
    return [{key: value for key, value in row.settings.items() if key not in left_out} for row in rows]


def varying(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys with several values among the settings that have them."""
    texts: dict[str, set[str]] = {}
    for own in settings:
        for key, value in own.items():
            texts.setdefault(key, set()).add(str(value))  # as text: options may be lists
    return [key for key, values in texts.items() if len(values) > 1]


def grouped(rows: Iterable[RunRow], kinds: Iterable[Hashable]) -> dict[Any, list[RunRow]]:
    """Rows of one kind together, in the order of their first ones."""
    groups: dict[Any, list[RunRow]] = {}
    for row, kind in zip(rows, kinds, strict=True):
        groups.setdefault(kind, []).append(row)
    return groups


def require_folder(path: Path) -> None:
    """Raise ConfigurationError where a path is no folder."""
    if not path.is_dir():
        raise ConfigurationError(f"there is no folder {path}.")


def row_of(folder: RunFolder, curves: bool = False) -> RunRow:
    """The row of one run.

    Args:
        folder: Folder of the run.
        curves: True to read its logged metrics, too.

    Raises:
        ConfigurationError: A file is damaged.
    """
    record = read_result(folder)
    config = record["config"]
    privacy = record["privacy"]
    metrics = without_accuracy(record)
    for name, value in privacy["epsilon"].items():
        # Infinite without privacy; else the accountant shows none.
        metrics[f"privacy/epsilon_{name}"] = math.inf if value is None and privacy.get("unit") is None else value
    if "audit" in privacy:
        metrics[AUDITED] = audited_epsilon(privacy)
    if record["seconds"]:  # a tuning keeps them secret
        metrics["seconds"] = record["seconds"]
        metrics[TIME] = 1000 * record["seconds"] / max(record["steps"], 1)
    metrics[STEPS] = record["steps"]
    foreign = {OWN_CODE + package: source[:8] for package, source in record.get("foreign_code", {}).items()}
    return RunRow(
        name=marked(f"{config['run']['name']}, seed {record['seed']}", doubt(privacy)),
        settings=flat_settings(config) | unit_setting(privacy.get("unit")) | foreign,
        metrics=metrics,
        curves=read_metrics(folder.metrics) if curves else pd.DataFrame(),
        record=record,
        folder=folder,
        words={
            "trained with canaries": "yes" if is_audited(record["config"]) else ABSENT,
            "evaluation split": record.get("judged_on", ABSENT),
            "unit": privacy.get("unit") or ABSENT,
            "verdict": verdict_of(privacy) or ABSENT,
            "ledger": privacy.get("damage", "intact"),
        },
        note=doubt(privacy),
    )


def marked(name: str, mark: str | None) -> str:
    """A name or a figure, with its doubt."""
    return name if mark is None else f"{name} ({mark})"


def unit_setting(unit: Any) -> dict[str, str]:
    """The unit of privacy, as a setting in which runs may differ."""
    return {} if unit is None or pd.isna(unit) else {UNIT: str(unit)}


def joined(words: Iterable[str | None]) -> str | None:
    """Each word once; None where there is none."""
    return ", ".join(dict.fromkeys(word for word in words if word is not None)) or None


def keys_of_any(mappings: Iterable[Iterable[str]]) -> list[str]:
    """Keys that any of several mappings has, each once, in the order in which they come first."""
    keys: dict[str, None] = {}
    for mapping in mappings:
        keys.update(dict.fromkeys(mapping))
    return list(keys)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration by dotted keys."""
    if not isinstance(config, Mapping) or not config:
        return {prefix: config}
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return values


def flat_settings(config: Any) -> dict[str, Any]:
    """Settings that may change a result, by dotted keys; of classes of ours the name alone."""
    settings = {}
    for key, value in flat(config).items():
        if not f"{key}.".startswith(_HIDDEN):
            of_class = isinstance(value, str) and value.startswith(("dpbench.", "torch."))
            settings[key] = value.rpartition(".")[2] if of_class else value
    return settings
