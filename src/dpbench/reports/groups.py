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
from dpbench.reports.markdown import markdown_rows
from dpbench.reports.run_rows import (
    CODE,
    MISSING,
    NOT_FINISHED,
    RunRow,
    flat,
    keys_of_any,
    without_seeds,
)
from dpbench.reports.run_table import (
    APART,
    TIME,
    RunTable,
    json_records,
    label_of,
    mark_best,
    outcome_means,
    outcome_texts,
    place_of_best,
)
from dpbench.runs.folder import unfinished_runs_below
from dpbench.runs.numbers import ABSENT

_MOST_NAMED = 8  # runs in a note


@dataclass(frozen=True)
class GroupTable:
    """Means of runs that are alike in some settings.

    Attributes:
        keys: These settings.
        frame: A row for each group, with unrounded figures: the keys, n, mean and standard deviation (`... sd`) of
            each metric, the largest epsilon (and the least, `... least`, where a group has several).
        rows: The same as people read it, the headings first.
        notes: What a reader has to know of the rows.
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
        folders: Of runs, or of sweeps.
        keys: As in `group_by`.

    Raises:
        ConfigurationError: One of the folders holds no finished run, or no run has one of the keys.
    """
    table = RunTable.read(folders)
    names = []
    for folder in folders:
        for run in unfinished_runs_below(folder):
            names.append(f"{run} ({NOT_FINISHED}: {run.command('resume')})")
    groups = group_by(table, keys)
    return replace(groups, notes=[*groups.notes, *missing_note(names, len(table.rows) + len(names))])


def group_by(table: RunTable, keys: Sequence[str]) -> GroupTable:
    """Put runs together that are alike in some settings.

    Args:
        table: Of the runs.
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
    for values, numbers in groups:
        members = outcomes.iloc[numbers]
        rows.append([*map(_brief, values), str(len(numbers)), *outcome_texts(members)])
        exact = dict(zip(keys, map(_exact, values), strict=True))
        lines.append({**exact, "n": len(numbers), **outcome_means(members)})
    frame = _without_equal_ends(pd.DataFrame(lines), outcomes)
    if table.validated is not None and label_of(table.validated[0]) in frame:
        name = table.validated[0]
        means = pd.to_numeric(frame[label_of(name)])
        mark_best(rows, table.validated, place_of_best(name, means))
    notes = []
    if len(groups) < len(table.rows):
        notes.append("Mean ± standard deviation of n runs.")
    differing = _differing_within(table, [numbers for _, numbers in groups], keys)
    if differing:
        notes.append(f"Runs of one row differ in more than their seed: in {', '.join(differing)}.")
    notes += table.best_note(keys)
    return GroupTable(tuple(keys), frame, rows, [*notes, *repeats])


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


def _groups(
    table: RunTable,
    outcomes: pd.DataFrame,
    keys: Sequence[str],
) -> list[tuple[list[Any], list[int]]]:
    """Values of the keys, and the places of the runs that have them, in ascending order of the values."""
    # By the settings, and by what must not enter one mean.
    apart = outcomes.filter(items=APART)
    settings = []
    for number, row in enumerate(table.rows):
        settings.append([*map(row.lookup, keys), *apart.iloc[number]])
    groups: dict[tuple[str, ...], list[int]] = {}
    for number in sorted(range(len(settings)), key=lambda number: list(map(_order, settings[number]))):
        # As text: 1 and 1.0 are one setting, and a list cannot be a key of a dictionary.
        kind = tuple(map(_setting_text, settings[number]))
        groups.setdefault(kind, []).append(number)
    return [(settings[numbers[0]][: len(keys)], numbers) for numbers in groups.values()]


def _without_equal_ends(frame: pd.DataFrame, outcomes: pd.DataFrame) -> pd.DataFrame:
    """The frame without the least value of a column that is the largest one, too, in every group."""
    for column in map(str, outcomes):
        least = f"{column} least"
        if least in frame and (frame[least].eq(frame[column]) | frame[column].isna()).all():
            frame = frame.drop(columns=least)
    return frame


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


def missing_note(names: Sequence[str], total: int) -> list[str]:
    """A note on runs that are in no row; none where all are there."""
    if not names:
        return []
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    are = "run is" if total == 1 else "runs is" if len(names) == 1 else "runs are"
    return [f"{len(names)} of {total} {are} missing: {'; '.join(names[:_MOST_NAMED])}{more}."]


# Values of settings


def _setting_text(value: Any) -> str:
    """A value of a setting, so that 1.0 is 1, which another run's command may have said."""
    if value is MISSING:
        return ABSENT
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _brief(value: Any) -> str:
    """A value of a setting, rounded."""
    return f"{value:.6g}" if isinstance(value, float) else _setting_text(value)


def _exact(value: Any) -> Any:
    """A number, or a text for what is none."""
    return value if _order(value)[0] == 0 else _setting_text(value)


def _order(value: Any) -> tuple[int, float, str]:
    """A key to sort settings by: numbers first, by their size."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, float(value), "")
    return (1, 0.0, _setting_text(value))
