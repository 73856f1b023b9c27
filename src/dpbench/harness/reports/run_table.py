"""Runs side by side: one row a run, with its settings, figures, epsilons, and what speaks against them.

`dpbench table`, `compare` and `report`, the end of a sweep and the tables of papers stand on this; `reports.groups`
puts runs together that are alike in some settings.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reports.run_rows import (
    AUDITED,
    MISSING,
    OWN_CODE,
    UNIT,
    RunRow,
    floats,
    keys_of_any,
    marked,
    require_folder,
    row_of,
    unit_setting,
    with_curves,
    without_seeds,
)
from dpbench.harness.runs.folder import RunFolder, finished_runs_below
from dpbench.harness.runs.metrics_log import better_direction
from dpbench.harness.runs.numbers import ABSENT, epsilon_text, mean_text, metric_text, range_text
from dpbench.harness.runs.record import (
    MEASURED,
    UNPROVEN,
    accusation,
    audited_epsilon,
    is_audited,
    verdict_of,
    without_accuracy,
)

EPSILON = "privacy/epsilon"
"""ε by RDP after so many steps, as a run logs it."""
AUDITED_LABEL = "audited epsilon (95 %)"
APART = ("trained with canaries", "evaluation split", "unit")
"""Columns of outcomes: figures of runs that differ in these have no mean."""
TIME = "ms per step"

_ACCURACIES = {
    "val/accuracy": "validation accuracy (%)",
    "test/accuracy": "test accuracy (%)",
    "evaluation/accuracy_cnn": "accuracy of a CNN on synthetic images (%)",
}
_WORDS = (*APART, "verdict", "ledger")
_RANGES = {AUDITED_LABEL: ".3f", "steps": ".0f", TIME: ".1f"}  # columns of which several runs show the ends, and how
_CLASSES = ("_target_", "name")  # settings whose values say what they are
_EPSILON_BY = "privacy/epsilon_rdp"
_LONGEST = 80  # letters of a legend's line
_MOST_COLUMNS = 8  # runs beside one another; more stand below one another


@dataclass(frozen=True)
class RunTable:
    """Runs, each with its settings and figures.

    Attributes:
        rows: In the order in which they are shown.
    """

    rows: tuple[RunRow, ...]

    @classmethod
    def read(cls, sources: Sequence[Path], curves: bool = False) -> RunTable:
        """Read all finished runs below some folders, in the order of the folders.

        Args:
            sources: Folders of runs, or of sweeps.
            curves: Whether to read what the runs logged, too.

        Raises:
            ConfigurationError: One of the folders holds no finished run, or a file is damaged.
        """
        folders: dict[RunFolder, None] = {}
        for source in sources:  # each: one that is mistyped must not be left out silently
            require_folder(source)
            below = finished_runs_below([source])
            if not below:
                raise ConfigurationError(f"no finished run (with a {RunFolder.result}) below {source}.")
            folders.update(dict.fromkeys(below))
        rows = [with_curves(row_of(folder)) if curves else row_of(folder) for folder in folders]
        names = Counter(row.name for row in rows)
        for number, row in enumerate(rows):
            if names[row.name] > 1:  # told apart by its folder
                rows[number] = replace(row, name=f"{row.name} ({row.folder})")
        return cls(tuple(rows))

    @classmethod
    def of(cls, folders: Iterable[RunFolder]) -> RunTable:
        """Read finished runs, without their curves."""
        return cls(tuple(map(row_of, folders)))

    # Settings

    def differing(self, stated: bool = False) -> list[str]:
        """Keys in which runs differ; not those that take their value from the seed, beside the seed itself.

        Args:
            stated: Leave out keys in which those runs do not differ that have them: options of one strategy, say.
        """
        free = keys_of_any(without_seeds(self.rows))
        differing = []
        for key in keys_of_any(row.settings for row in self.rows):
            rows = list(self.rows)
            if stated or key.startswith(OWN_CODE):  # a package that a run does not use has no code in it
                rows = [row for row in self.rows if key in row.settings]
            # An option that is null, and one that the class of a run does not have, are no difference.
            values = {None if row.settings.get(key) is None else _setting(row, key) for row in rows}
            if len(values) > 1 and key in (*free, "seed", UNIT):
                differing.append(key)
        return differing

    def distinguishing(self) -> list[str]:
        """As few keys as distinguish all runs that differ: first those that all of them set, classes before options."""

        def rank(key: str) -> tuple[bool, bool, bool]:
            missing = any(row.settings.get(key) is None for row in self.rows)
            return key == "seed", missing, not key.endswith(_CLASSES)

        # One key after the other, where it tells more runs apart than those before it do: few, if not the fewest.
        kinds = 1
        chosen: list[str] = []
        for key in sorted(self.differing(), key=rank):
            if key == UNIT:
                continue
            values = {tuple(_setting(row, name) for name in (*chosen, key)) for row in self.rows}
            if len(values) > kinds:
                kinds = len(values)
                chosen.append(key)
        return chosen

    def labels(self) -> list[str]:
        """What distinguishes each run from the others, for a legend; its name where that is too long or not enough."""
        names = [row.name for row in self.rows]
        keys = self.distinguishing()
        labels = []
        for row in self.rows:
            parts = []
            for key in keys:
                if row.settings.get(key) is not None:
                    parts.append(f"{_end(key.removesuffix('._target_'))}={row.settings[key]}")
            count = f" (n = {row.n})" if row.n > 1 else ""
            label = marked(", ".join(parts) + count, row.note)
            labels.append(label if parts and len(label) <= _LONGEST else row.name)
        return labels if len(set(labels)) == len(labels) else names

    def knows(self, key: str) -> bool:
        """Whether any run has a key."""
        return any(row.lookup(key) is not MISSING for row in self.rows)

    # One row a run

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """What came out of each run.

        Columns: accuracies (of other tasks what was measured on validation and test data; nothing of a model that
        learned from the canaries of an audit, which a column says), the unit of privacy where one is no example,
        epsilon by each accountant (infinite without privacy), `audited epsilon (95 %)` and `verdict` where a run was
        audited, `ledger` where one is not intact, milliseconds per step, steps.
        """
        records = [row.record for row in self.rows]
        metrics = pd.DataFrame([without_accuracy(record) for record in records]).astype(float)
        columns: dict[str, Any] = {}
        for name, label in _ACCURACIES.items():
            if name in metrics and metrics[name].notna().any():
                columns[label] = 100 * metrics[name]
        if not columns:  # no classifiers
            for name in sorted(map(str, metrics), reverse=True):
                if name.startswith(MEASURED):
                    columns[name] = metrics[name]
        # What a sweep chose by is shown, whatever else is.
        for name in sorted({name for record in records for name in _objectives(record)} - {*_ACCURACIES}):
            columns.setdefault(name, metrics.get(name, math.nan))
        with_canaries, split, _ = APART
        if any(map(is_audited, records)):
            columns[with_canaries] = ["yes" if is_audited(record) else ABSENT for record in records]
        judged = [record.get("judged_on", ABSENT) for record in records]
        if "val" in judged:
            columns[split] = judged
        columns |= _privacy_columns([record["privacy"] for record in records])
        columns[TIME] = [1000 * record["seconds"] / max(record["steps"], 1) for record in records]
        columns["steps"] = [record["steps"] for record in records]
        return pd.DataFrame(columns)

    def frame(self, folders: bool = False) -> pd.DataFrame:
        """A row for each run: its name, the settings in which runs differ, and the outcomes.

        Args:
            folders: Add a column that says where each run lies.
        """
        return pd.concat([self._names(folders), self.outcomes], axis=1)

    def _names(self, folders: bool) -> pd.DataFrame:
        """The columns to the left of the outcomes."""
        names: dict[str, list[Any]] = {"run": [row.record["config"]["run"]["name"] for row in self.rows]}
        if folders:
            names["folder"] = [str(row.folder) for row in self.rows]
        # An option that only some strategies have differs if the runs of those strategies differ in it.
        for key in self.differing(stated=True):
            if key != UNIT:
                values = [row.settings.get(key) for row in self.rows]
                names[key.removesuffix("._target_")] = [ABSENT if value is None else value for value in values]
        return pd.DataFrame(names).astype(object)

    @cached_property
    def validated(self) -> tuple[str, pd.Series[float]] | None:
        """The metric on validation data by which a best run is chosen, and its value of each run; None without one.

        That is the objective of a sweep if it is such a metric, else the accuracy, else the first that says whether
        more or less is better.
        """
        metrics = pd.DataFrame([dict(row.metrics) for row in self.rows]).astype(float)
        asked = {tuple(_objectives(row.record)) for row in self.rows}
        names = [*(asked.pop() if len(asked) == 1 else ()), "val/accuracy", *sorted(map(str, metrics))]
        for name in names:
            if name in metrics and better_direction(name) is not None and metrics[name].notna().any():
                return name, metrics[name]
        return None

    def best_note(self) -> list[str]:
        """One line that names the run that is best by validation; none of fewer than two, or of equal ones."""
        if self.validated is None or self.validated[1].nunique() < 2:
            return []
        name, values = self.validated
        row = self.rows[int(values.argmax() if better_direction(name) == "max" else values.argmin())]
        return [f"Best by {name}: {row.folder or row.name} ({metric_text(name, row.metrics[name])})."]

    def to_markdown(self, folders: bool = False) -> str:
        """The frame, with rounded figures and doubts beside each epsilon; below it, which run is best by validation."""
        names = self._names(folders)
        rows = [[*map(str, names), *map(str, self.outcomes)]]
        for number in range(len(names)):
            figures = outcome_texts(self.outcomes.iloc[[number]])
            rows.append([*map(str, names.iloc[number]), *figures])
        return "\n\n".join([markdown_rows(rows), *self.best_note()])

    def to_csv(self, folders: bool = False) -> str:
        """The frame, unrounded."""
        return str(self.frame(folders).to_csv(index=False))

    def to_records(self, folders: bool = False) -> list[dict[str, Any]]:
        """A dictionary for each run, fit for JSON: figures that are missing or infinite are None."""
        return json_records(self.frame(folders))

    # One column a run

    def compare(self) -> str:
        """`compared_rows` in Markdown."""
        return markdown_rows(self.compared_rows())

    def compared_rows(self) -> list[list[str]]:
        """Runs beside one another, many below one another: settings in which they differ, and figures; names first."""
        rows = [["", *(row.name for row in self.rows)]]
        for key in self.differing():
            rows.append([key, *(_setting(row, key) for row in self.rows)])
        rows += self.figures()
        if len(self.rows) > _MOST_COLUMNS:
            rows = [list(cells) for cells in zip(*rows, strict=True)]
            rows[0][0] = "run"
        return rows

    def figures(self) -> list[list[str]]:
        """Final figures as people read them, a line for each."""
        names = keys_of_any(row.metrics for row in self.rows)
        lines = []
        for name in names:
            if "/" not in name and name != "seconds":
                continue
            if name == EPSILON and _EPSILON_BY in names:  # the same, as it was logged last
                continue
            cells = []
            for row in self.rows:
                value = row.metrics.get(name)
                is_epsilon = name.startswith("privacy/epsilon") and value is not None
                deviation = row.deviations.get(name)
                cells.append(epsilon_text(value) if is_epsilon else metric_text(name, value, deviation))
            lines.append([AUDITED_LABEL if name == AUDITED else name, *cells])
        verdicts = [row.verdict for row in self.rows]
        if any(verdicts):
            lines.append(["verdict of the audit", *(verdict or ABSENT for verdict in verdicts)])
        return lines

    def compared_records(self) -> list[dict[str, Any]]:
        """A dictionary for each run, fit for JSON: its name, settings in which runs differ, and unrounded figures."""
        keys = self.differing()
        records = []
        for row in self.rows:
            record = {
                "name": row.name,
                "n": row.n,
                "settings": {key: row.settings.get(key) for key in keys},
                "metrics": _finite(row.metrics),
                "deviations": _finite(row.deviations),
                "verdict": row.verdict,
                "note": row.note,
            }
            records.append(record)
        return records

    def over_seeds(self) -> RunTable:
        """Mean and standard deviation of runs that differ by their seed only, each group in the place of its first."""
        return RunTable(tuple(_mean(rows) if len(rows) > 1 else rows[0] for rows in self.groups_of_seeds()))

    def groups_of_seeds(self) -> list[list[RunRow]]:
        """Runs that differ by their seed only, together; the groups in the order of their first runs."""
        groups: dict[str, list[RunRow]] = {}
        for row, settings in zip(self.rows, without_seeds(self.rows), strict=True):
            kind = [settings, row.settings.get(UNIT), row.code]
            groups.setdefault(json.dumps(kind, sort_keys=True, default=str), []).append(row)
        return list(groups.values())


def _objectives(record: Mapping[str, Any]) -> list[str]:
    """The metrics by which a sweep chose."""
    named = (record.get("config") or {}).get("objective") or []
    return [named] if isinstance(named, str) else list(named)


def _setting(row: RunRow, key: str) -> str:
    return str(row.settings.get(key, ABSENT))


def _end(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


# Outcomes


def _privacy_columns(privacies: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What runs guarantee, and what their audits and ledgers say of it."""
    columns: dict[str, list[Any]] = {}
    units = [privacy.get("unit") or ABSENT for privacy in privacies]
    if set(units) - {"example", ABSENT}:
        columns["unit"] = units
    accountants = {name for privacy in privacies for name in privacy["epsilon"]}
    for name in sorted(accountants, reverse=True):
        columns[f"epsilon ({name.upper()})"] = [_epsilon(privacy, name) for privacy in privacies]
    if any("audit" in privacy for privacy in privacies):
        columns[AUDITED_LABEL] = list(map(audited_epsilon, privacies))
        columns["verdict"] = [verdict_of(privacy) or ABSENT for privacy in privacies]
    if any("damage" in privacy for privacy in privacies):
        columns["ledger"] = [privacy.get("damage", "intact") for privacy in privacies]
    return columns


def _epsilon(privacy: Mapping[str, Any], accountant: str) -> float:
    """Infinite without privacy, not a number where the accountant shows none."""
    value = privacy["epsilon"].get(accountant)
    if value is not None:
        return float(value)
    return math.inf if privacy.get("unit") is None else math.nan


def outcome_texts(outcomes: pd.DataFrame) -> list[str]:
    """Outcomes of one or several runs as people read them, a cell for each column."""
    doubts = []
    for _, outcome in outcomes.iterrows():
        intact = outcome.get("ledger", "intact") == "intact"
        doubts.append(accusation(outcome.get("verdict")) if intact else UNPROVEN)
    doubt = joined(doubts)
    figures = outcome_means(outcomes)
    cells = []
    for column in map(str, outcomes):
        figure = figures[column]
        if column in _WORDS:
            cells.append(figure)
        elif _has_mean(column):
            cells.append(mean_text(figure, figures[f"{column} sd"], percent=column in _ACCURACIES.values()))
        elif math.isnan(figure):
            cells.append(ABSENT if column in _RANGES else marked(ABSENT, doubt))
        elif column in _RANGES:
            cells.append(range_text([figures[f"{column} least"], figure], _RANGES[column]))
        else:
            ends = dict.fromkeys([epsilon_text(figures[f"{column} least"]), epsilon_text(figure)])
            cells.append(marked(" to ".join(ends), doubt))
    return cells


def outcome_means(outcomes: pd.DataFrame) -> dict[str, Any]:
    """Outcomes of one or several runs as unrounded figures, by the columns of a frame of groups."""
    line: dict[str, Any] = {}
    for name, values in outcomes.items():
        column = str(name)
        if column in _WORDS:
            line[column] = joined(map(str, values)) or ABSENT
            continue
        # A figure that is missing may be the largest of all.
        numbers = pd.to_numeric(values, errors="coerce")
        if _has_mean(column):
            line[column] = float(numbers.mean(skipna=False))
            line[f"{column} sd"] = float(numbers.std(skipna=False))
        else:
            line[f"{column} least"] = numbers.min(skipna=False)
            line[column] = numbers.max(skipna=False)
    return line


def _has_mean(column: str) -> bool:
    """Whether the mean stands for several runs: of an epsilon the largest does, of steps and times the range."""
    return column not in _RANGES and not column.startswith("epsilon (")


def json_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A dictionary for each row, fit for JSON."""
    return [_finite(record) for record in frame.rename(columns=str).to_dict("records")]


def _finite(values: Mapping[Any, Any]) -> dict[str, Any]:
    """With None for what is no finite number: JSON has no other."""
    finite = dict(values)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[key] = None
    return finite


# Means


def _mean(rows: Sequence[RunRow]) -> RunRow:
    """Of metrics that all of them have, at steps at which all of them logged; of epsilons the largest."""
    first = rows[0]
    table = pd.DataFrame([dict(row.metrics) for row in rows], columns=list(first.metrics)).astype(float)
    # A mean of epsilons would hold for none of the runs; the largest holds for each.
    largest = table.filter(regex="^privacy/")
    metrics = table.mean(skipna=False)
    metrics.update(largest.max(skipna=False))
    deviations = table.drop(columns=largest.columns).std(skipna=False)
    means = {}
    bands = {}
    for name in map(str, first.curves):
        # At steps that all of them logged: elsewhere a mean would jump where one curve begins or ends.
        if all(name in row.curves for row in rows):
            curves = [row.curves[name].dropna() for row in rows]
            together = pd.concat(curves, axis=1, join="inner")
            means[name] = together.mean(axis=1)
            bands[name] = together.std(axis=1)
    name = first.name.rpartition(", seed ")[0]
    note = joined(row.note for row in rows)
    seeds = ", ".join(str(row.settings.get("seed")) for row in rows)
    return replace(
        first,
        name=marked(f"{name} (n = {len(rows)})", note),
        settings=without_seeds(rows)[0] | unit_setting(first.settings.get(UNIT)) | {"seed": seeds},
        metrics=floats(metrics),
        curves=pd.DataFrame(means),
        folder=None,
        verdict=joined(row.verdict for row in rows),
        note=note,
        n=len(rows),
        deviations=floats(deviations),
        bands=pd.DataFrame(bands),
    )


def joined(words: Iterable[str | None]) -> str | None:
    """Each word once; None where there is none."""
    return ", ".join(dict.fromkeys(word for word in words if word is not None)) or None
