"""Means of runs that agree in some settings: `dpbench table --group-by`, and the end of a sweep."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dpbench.errors import ConfigurationError, did_you_mean
from dpbench.harness.reports.run_rows import CODE, RunRow, flat, grouped, keys_of_any, varying, without_seeds
from dpbench.harness.reports.run_table import CLASS, RunTable, mean

_APART = ("trained with canaries", "evaluation split", "unit")
"""Words of rows: figures of runs that differ in these have no mean."""


def keys_of(words: str) -> tuple[str, ...]:
    """Keys from "optimizer.lr,strategy".

    Raises:
        ConfigurationError: There is none.
    """
    keys = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not keys:
        raise ConfigurationError("--group-by requires at least one key, such as optimizer.lr,strategy.")
    return keys


def group_by(table: RunTable, keys: Sequence[str]) -> RunTable:
    """Group runs that agree in some settings, and take their means.

    Args:
        table: The runs.
        keys: Dotted keys of the configuration, or groups of it (then by the name of the file that was chosen).

    Raises:
        ConfigurationError: No run has one of the keys.
    """
    _require_keys(table, keys)
    once, repeats = _without_repeats(table)
    # Also by facts that must not be averaged over.
    kinds = [[*map(row.lookup, keys), *(row.words[name] for name in _APART)] for row in once]
    members = [group for _, group in sorted(grouped(once, [tuple(map(_order, kind)) for kind in kinds]).items())]
    notes = []
    if len(members) < len(once):
        notes.append("Mean ± standard deviation of n runs.")
    differing = _differing_within(members, keys)
    if differing:
        notes.append(f"Runs of one row differ in more than their seed: in {', '.join(differing)}.")
    notes += [*RunTable(once).best_note(), *repeats, *table.notes]
    return RunTable(tuple(map(mean, members)), tuple(keys), tuple(notes))


def _require_keys(table: RunTable, keys: Sequence[str]) -> None:
    """Raise ConfigurationError where no run has one of the keys: a mistyped one would make one group of all."""
    for key in keys:
        if table.knows(key):
            continue
        names: set[str] = set()
        for row in table.rows:
            names.update(flat(row.record["config"]), row.choices)
        raise ConfigurationError(f"no run has a key {key}.{did_you_mean(key, sorted(names))}")


def _without_repeats(table: RunTable) -> tuple[tuple[RunRow, ...], list[str]]:
    """Keep each seeded run once: the same settings, seed and code give the same run."""
    identities = []
    for number, row in enumerate(table.rows):
        facts = [row.record.get(name) for name in ("config_hash", CODE, "versions", "foreign_code")]
        secure = bool((row.record["config"].get("strategy") or {}).get("secure"))
        identities.append(str(number) if None in facts or secure else json.dumps(facts, sort_keys=True))
    copies = grouped(table.rows, identities).values()
    repeated = ", ".join(str(row.folder) for rows in copies for row in rows[1:])
    note = f"Of runs with the same settings, seed and code one counts; left out: {repeated}."
    return tuple(rows[0] for rows in copies), [note] if repeated else []


def _differing_within(groups: Iterable[Sequence[RunRow]], keys: Sequence[str]) -> list[str]:
    """Settings, and code, in which runs of one group differ."""
    differing: dict[str, None] = {}
    for members in groups:
        settings = [
            {**own, CODE: row.record.get(CODE)} for row, own in zip(members, without_seeds(members), strict=True)
        ]
        absent = dict.fromkeys(keys_of_any(settings))
        for name in varying(absent | own for own in settings):
            if name not in ("objective", *keys):
                differing[name.removesuffix(CLASS)] = None
    return list(differing)


def _order(value: Any) -> tuple[int, float, str]:
    """A key by which settings are sorted and compared: 1 and 1.0 are one setting."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))
