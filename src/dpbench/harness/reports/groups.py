"""Runs that are alike in some settings, as means: `dpbench table --group-by`, and the end of a sweep."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reports.run_rows import CODE, MISSING, RunRow, flat, keys_of_any, without_seeds
from dpbench.harness.reports.run_table import APART, TIME, RunTable, json_records, outcome_means, outcome_texts
from dpbench.harness.runs.folder import unfinished_runs_below
from dpbench.harness.runs.numbers import ABSENT

_MOST_NAMED = 8  # runs in a note


@dataclass(frozen=True)
class GroupTable:
    """Means of runs that are alike in some settings.

    Attributes:
        keys: These settings.
        frame: A row for each group, with unrounded figures: the keys, n, mean and standard deviation (`... sd`) of
            each metric, the largest epsilon and the least (`... least`).
        rows: The same as text, the headings first.
        notes: Notes on the rows.
    """

    keys: tuple[str, ...]
    frame: pd.DataFrame
    rows: list[list[str]]
    notes: list[str]

    def to_markdown(self) -> str:
        """The table, and its notes as paragraphs."""
        return "\n\n".join([markdown_rows(self.rows, len(self.keys)), *self.notes])

    def to_csv(self) -> str:
        """The frame; without the notes."""
        return str(self.frame.to_csv(index=False))

    def to_records(self) -> list[dict[str, Any]]:
        """A dictionary for each group, fit for JSON: figures that are missing or infinite are None."""
        return json_records(self.frame)


def keys_of(words: str) -> tuple[str, ...]:
    """Keys from "optimizer.lr,strategy".

    Raises:
        ConfigurationError: There is none.
    """
    keys = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not keys:
        raise ConfigurationError("--group-by names no key: --group-by optimizer.lr,strategy, say.")
    return keys


def grouped(folders: Sequence[Path], keys: Sequence[str]) -> GroupTable:
    """Group all finished runs below some folders, and name those that are not finished.

    Args:
        folders: Folders of runs, or of sweeps.
        keys: As in `group_by`.

    Raises:
        ConfigurationError: One of the folders holds no finished run, or no run has one of the keys.
    """
    table = RunTable.read(folders)
    groups = group_by(table, keys)
    return replace(groups, notes=[*groups.notes, *unfinished_note(folders, len(table.rows))])


def group_by(table: RunTable, keys: Sequence[str]) -> GroupTable:
    """Put runs together that are alike in some settings.

    Args:
        table: The runs.
        keys: Dotted keys of the configuration, or groups of it (then by the name of the file that was chosen).

    Raises:
        ConfigurationError: No run has one of the keys.
    """
    _require_keys(table, keys)
    table, repeats = _without_repeats(table)
    outcomes = table.outcomes.drop(columns=TIME)
    groups = _groups(table, outcomes, keys)
    rows = [[*keys, "n", *map(str, outcomes)]]
    lines = []
    for numbers in groups:
        members = outcomes.iloc[numbers]
        values = [table.rows[numbers[0]].lookup(key) for key in keys]
        texts = [f"{value:.6g}" if isinstance(value, float) else _setting_text(value) for value in values]
        rows.append([*texts, str(len(numbers)), *outcome_texts(members)])
        exact = [value if _is_number(value) else _setting_text(value) for value in values]
        lines.append({**dict(zip(keys, exact, strict=True)), "n": len(numbers), **outcome_means(members)})
    notes = []
    if len(groups) < len(table.rows):
        notes.append("Mean ± standard deviation of n runs.")
    differing = _differing_within(table, groups, keys)
    if differing:
        notes.append(f"Runs of one row differ in more than their seed: in {', '.join(differing)}.")
    return GroupTable(tuple(keys), pd.DataFrame(lines), rows, [*notes, *table.best_note(), *repeats])


def _require_keys(table: RunTable, keys: Sequence[str]) -> None:
    """Raise ConfigurationError where no run has one of the keys: a mistyped one would make one group of all."""
    for key in keys:
        if table.knows(key):
            continue
        names: set[str] = set()
        for row in table.rows:
            names.update(flat(row.record["config"]), row.choices)
        near = difflib.get_close_matches(key, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"no run has a key {key}.{hint}")


def _groups(table: RunTable, outcomes: pd.DataFrame, keys: Sequence[str]) -> list[list[int]]:
    """Places of the runs of each group, in ascending order of the settings, numbers first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, row in enumerate(table.rows):
        # Also by what must not enter one mean.
        settings = [*map(row.lookup, keys), *outcomes.filter(items=APART).iloc[number]]
        groups.setdefault(tuple(map(_order, settings)), []).append(number)
    return [groups[kind] for kind in sorted(groups)]


def _without_repeats(table: RunTable) -> tuple[RunTable, list[str]]:
    """Each seeded run once: the same settings, seed and code give the same run, and no other draw of anything."""
    once: dict[str, RunRow] = {}
    repeated = []
    for number, row in enumerate(table.rows):
        facts = [row.record.get(name) for name in ("config_hash", CODE, "versions", "foreign_code")]
        secure = bool((row.record["config"].get("strategy") or {}).get("secure"))
        identity = str(number) if None in facts or secure else json.dumps(facts, sort_keys=True)
        if identity in once:
            repeated.append(str(row.folder))
        else:
            once[identity] = row
    if not repeated:
        return table, []
    note = f"Of runs with the same settings, seed and code one counts; left out: {', '.join(repeated)}."
    return RunTable(tuple(once.values())), [note]


def _differing_within(table: RunTable, groups: Iterable[Sequence[int]], keys: Sequence[str]) -> list[str]:
    """Settings, and code, in which runs of one group differ."""
    differing: dict[str, None] = {}
    for numbers in groups:
        members = [table.rows[number] for number in numbers]
        settings = [{**own, CODE: row.code} for row, own in zip(members, without_seeds(members), strict=True)]
        for name in keys_of_any(settings):
            values = {str(setting.get(name)) for setting in settings}  # as text: options may be lists
            if len(values) > 1 and name not in ("objective", *keys):
                differing[name.removesuffix("._target_")] = None
    return list(differing)


def unfinished_note(folders: Sequence[Path], finished: int) -> list[str]:
    """A note on runs below some folders that are in no row; none where all have ended.

    Args:
        folders: Folders of runs, or of sweeps.
        finished: Number of runs that have ended.
    """
    names = []
    for folder in folders:
        for run in unfinished_runs_below(folder):
            names.append(f"{run} ({run.command('resume')})")
    if not names:
        return []
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return [f"{len(names)} of {finished + len(names)} runs are not finished: {'; '.join(names[:_MOST_NAMED])}{more}."]


def _order(value: Any) -> tuple[int, float, str]:
    """A key by which settings are sorted and compared: 1 and 1.0 are one setting."""
    return (0, float(value), "") if _is_number(value) else (1, 0.0, _setting_text(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _setting_text(value: Any) -> str:
    """A value of a setting that is no number."""
    if value is MISSING:
        return ABSENT
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
