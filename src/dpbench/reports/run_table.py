"""Runs side by side: one row a run, with its settings, figures, epsilons, and what speaks against them.

`dpbench table`, `compare` and `report`, the end of a sweep and the tables of papers stand on this.
"""

from __future__ import annotations

import difflib
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
from dpbench.reports.markdown import markdown_rows
from dpbench.reports.run_rows import (
    AUDITED,
    CELLS,
    CODE,
    MISSING,
    NOT_FINISHED,
    UNIT,
    RunRow,
    cells_of,
    flat,
    floats,
    marked,
    require_folder,
    row_of,
    rows_of_wandb,
    unfinished_below,
    unit_setting,
    with_curves,
)
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.numbers import ABSENT, epsilon_text, mean_text, metric_text, range_text
from dpbench.runs.record import (
    MEASURED,
    UNPROVEN,
    accusation,
    audited_epsilon,
    is_audited,
    read_result,
    verdict_of,
    without_accuracy,
)

EPSILON = "privacy/epsilon"
"""ε after so many steps, as a run logs it."""
AUDITED_LABEL = "audited epsilon (95 %)"

_ACCURACIES = {
    "val/accuracy": "validation accuracy (%)",
    "test/accuracy": "test accuracy (%)",
    "evaluation/accuracy_cnn": "accuracy of a CNN on synthetic images (%)",
}
_CANARIES = "trained with canaries"
_JUDGED = "evaluation split"
_TIME = "ms per step"
_APART = (_CANARIES, _JUDGED, "unit")  # figures of runs that differ in these have no mean
_WORDS = (*_APART, "verdict", "ledger")
_CLASSES = ("_target_", "name")  # settings whose values say what they are
_LONGEST = 80  # letters of a legend's line
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
        return _records(self.frame)


@dataclass(frozen=True)
class RunTable:
    """Runs, each with its settings and figures.

    Attributes:
        rows: In the order in which they are shown.
    """

    rows: tuple[RunRow, ...]

    @classmethod
    def read(cls, folders: Sequence[Path]) -> RunTable:
        """Read all finished runs below some folders, sorted by folder, without their curves.

        Args:
            folders: Of runs, or of sweeps.

        Raises:
            ConfigurationError: One of the folders holds no finished run, or a file is damaged.
        """
        for folder in folders:  # each: one that is mistyped must not be left out silently
            require_folder(folder)
            if not finished_runs_below([folder]):
                raise ConfigurationError(f"no finished run (with a {RunFolder.result}) below {folder}.")
        return cls.of(finished_runs_below(folders))

    @classmethod
    def of(cls, folders: Iterable[RunFolder]) -> RunTable:
        """Read finished runs, without their curves."""
        return cls(tuple(row_of(folder, read_result(folder)) for folder in folders))

    @classmethod
    def read_sources(cls, sources: Sequence[str]) -> RunTable:
        """Read finished runs and cells of papers' tables with their curves, in the order of the sources.

        Args:
            sources: Folders of runs, of sweeps, or of a table's results; or wandb:ENTITY/PROJECT[:GROUP].

        Raises:
            ConfigurationError: One of them holds nothing of that kind, or a file is damaged.
        """
        rows: list[RunRow] = []
        for source in sources:
            if source.startswith("wandb:"):
                rows += rows_of_wandb(source.removeprefix("wandb:"))
                continue
            path = Path(source)
            require_folder(path)
            if (path / CELLS).is_file():
                rows += cells_of(path)
                continue
            folders = finished_runs_below([path])
            if not folders:
                raise ConfigurationError(f"{path} holds no finished run ({RunFolder.result}) and no table ({CELLS}).")
            rows += [with_curves(row_of(folder, read_result(folder))) for folder in folders]
        return cls(tuple(rows)).told_apart()

    def told_apart(self) -> RunTable:
        """Add the folder to names that several runs have."""
        count = Counter(row.name for row in self.rows)
        rows = [
            replace(row, name=f"{row.name} ({row.folder.path.name})") if count[row.name] > 1 and row.folder else row
            for row in self.rows
        ]
        return RunTable(tuple(rows))

    # Settings

    @cached_property
    def settings(self) -> pd.DataFrame:
        """A column for each key that any run has; not a number where a run lacks it."""
        return pd.DataFrame([dict(row.settings) for row in self.rows]).astype(object)

    def differing(self, stated: bool = False) -> list[str]:
        """Keys in which runs differ.

        Args:
            stated: Leave out keys in which those runs do not differ that have them: options of one strategy, say.
        """
        # What a cell of a table does not state is unknown, and no difference to a run of which everything is known.
        stated = stated or len({row.whole for row in self.rows}) > 1
        keys = dict.fromkeys(key for row in self.rows for key in row.settings)
        return [key for key in keys if len(self._values(key, stated)) > 1]

    def _values(self, key: str, stated: bool) -> set[str]:
        return {str(row.settings.get(key, ABSENT)) for row in self.rows if not stated or key in row.settings}

    def distinguishing(self) -> list[str]:
        """As few keys as distinguish all runs that differ: first those that all of them set, classes before options."""
        keys = [key for key in self.differing() if any(key in row.without_seed for row in self.rows) and key != "seed"]
        keys.sort(key=lambda key: (any(row.settings.get(key) is None for row in self.rows), not key.endswith(_CLASSES)))
        kinds = 1
        chosen: list[str] = []
        for key in [*keys, "seed"]:
            values = {tuple(str(row.settings.get(name, ABSENT)) for name in (*chosen, key)) for row in self.rows}
            if len(values) > kinds:
                kinds = len(values)
                chosen.append(key)
        return chosen

    def labels(self) -> list[str]:
        """What distinguishes each run from the others, for a legend; its name where that is too long or not enough."""
        keys = self.distinguishing()
        ends = Counter(key.rpartition(".")[2] for key in keys)
        labels = []
        for row in self.rows:
            parts = []
            for key in keys:
                end = key.rpartition(".")[2]
                value = row.settings.get(key)
                if value is not None:
                    parts.append(str(value) if end in _CLASSES else f"{end if ends[end] == 1 else key}={value}")
            count = f" (n = {row.n})" if row.n > 1 else ""
            label = marked(", ".join(parts) + count, row.note)
            labels.append(label if parts and len(label) <= _LONGEST else row.name)
        named = not all(row.whole for row in self.rows)  # cells have names that people gave them
        return [row.name for row in self.rows] if named or len(set(labels)) < len(labels) else labels

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
            columns |= {
                name: metrics[name] for name in sorted(map(str, metrics), reverse=True) if name.startswith(MEASURED)
            }
        for name in sorted({str(record["config"].get("objective") or "") for record in records}):
            if name and name not in _ACCURACIES:
                columns.setdefault(name, metrics.get(name, math.nan))
        canaries = [is_audited(record) for record in records]
        if any(canaries):
            columns[_CANARIES] = ["yes" if audited else ABSENT for audited in canaries]
        judged = [record.get("judged_on", ABSENT) for record in records]
        if "val" in judged:
            columns[_JUDGED] = judged
        columns |= _privacy_columns([record["privacy"] for record in records])
        columns[_TIME] = [1000 * record["seconds"] / max(record["steps"], 1) for record in records]
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
        names = pd.DataFrame({"run": [row.record["config"]["run"]["name"] for row in self.rows]})
        if folders:
            names["folder"] = [str(row.folder) for row in self.rows]
        for key, values in self.settings.items():
            # An option that only some strategies have differs if the runs of those strategies differ in it.
            if key != UNIT and values.dropna().astype(str).nunique() > 1:
                names[str(key).removesuffix("._target_")] = values.where(values.notna(), ABSENT)
        return names

    def to_markdown(self, folders: bool = False) -> str:
        """The frame, with rounded figures, and doubts beside each epsilon."""
        names = self._names(folders)
        rows = [[*map(str, names), *map(str, self.outcomes)]]
        for number in range(len(names)):
            rows.append([*map(str, names.iloc[number]), *_texts(self.outcomes.iloc[[number]])])
        return markdown_rows(rows)

    def to_csv(self, folders: bool = False) -> str:
        """The frame, unrounded."""
        return str(self.frame(folders).to_csv(index=False))

    def to_records(self, folders: bool = False) -> list[dict[str, Any]]:
        """A dictionary for each run, fit for JSON: figures that are missing or infinite are None."""
        return _records(self.frame(folders))

    # One column a run

    def compare(self) -> str:
        """`compared_rows` in Markdown."""
        return markdown_rows(self.compared_rows())

    def compared_rows(self) -> list[list[str]]:
        """Runs as columns, as people read them: settings in which they differ, and figures; names first."""
        rows = [["", *(row.name for row in self.rows)]]
        for key in self.differing():
            rows.append([key, *(str(row.settings.get(key, ABSENT)) for row in self.rows)])
        return rows + self.figures()

    def figures(self) -> list[list[str]]:
        """Final figures as people read them, a line for each."""
        names = dict.fromkeys(key for row in self.rows for key in row.metrics if "/" in key or key == "seconds")
        lines = []
        for name in names:
            if name.startswith("privacy/audited_") and name != AUDITED:  # single bounds and the like, as wandb has them
                continue
            cells = [metric_text(name, row.metrics.get(name), row.deviations.get(name)) for row in self.rows]
            lines.append([AUDITED_LABEL if name == AUDITED else name, *cells])
        if any(row.verdict is not None for row in self.rows):
            lines.append(["verdict of the audit", *(row.verdict or ABSENT for row in self.rows)])
        return lines

    def compared_records(self) -> list[dict[str, Any]]:
        """A dictionary for each run, fit for JSON: its name, settings in which runs differ, and unrounded figures."""
        keys = self.differing()
        return [
            {
                "name": row.name,
                "n": row.n,
                "settings": {key: row.settings.get(key) for key in keys},
                "metrics": _finite(row.metrics),
                "deviations": _finite(row.deviations),
                "verdict": row.verdict,
                "note": row.note,
            }
            for row in self.rows
        ]

    # Means

    def over_seeds(self) -> RunTable:
        """Mean and standard deviation of runs that differ by their seed only, each group in the place of its first."""
        groups: dict[str, list[RunRow]] = {}
        for number, row in enumerate(self.rows):
            unit = row.settings.get(UNIT)
            kind = [row.without_seed, unit, row.code] if row.whole else number  # cells are means already
            groups.setdefault(json.dumps(kind, sort_keys=True, default=str), []).append(row)
        return RunTable(tuple(_mean(rows) if len(rows) > 1 else rows[0] for rows in groups.values()))

    def knows(self, key: str) -> bool:
        """Whether any run has a key."""
        return any(row.lookup(key) is not MISSING for row in self.rows)

    def group_by(self, keys: Sequence[str]) -> GroupTable:
        """Put runs together that are alike in some settings.

        Args:
            keys: Dotted keys of the configuration, or groups of it (then by the name of the file that was chosen).

        Raises:
            ConfigurationError: No run has one of the keys.
        """
        for key in keys:
            if not self.knows(key):
                names = {name for row in self.rows for name in (*flat(row.record["config"]), *row.choices)}
                near = difflib.get_close_matches(key, names, 1)
                raise ConfigurationError(f"no run has a key {key}." + (f" Did you mean {near[0]}?" if near else ""))
        table, notes = self._without_repeats()
        outcomes = table.outcomes.drop(columns=_TIME)
        apart = outcomes.filter(items=_APART)
        values = [[*map(row.lookup, keys), *apart.iloc[number]] for number, row in enumerate(table.rows)]
        groups: dict[tuple[str, ...], list[int]] = {}
        for number in sorted(range(len(values)), key=lambda number: list(map(_order, values[number]))):
            groups.setdefault(tuple(map(_setting_text, values[number])), []).append(number)
        rows = [[*keys, "n", *map(str, outcomes)]]
        lines = []
        for numbers in groups.values():
            settings = dict(zip(keys, values[numbers[0]], strict=False))
            members = outcomes.iloc[numbers]
            rows.append([*map(_brief, settings.values()), str(len(numbers)), *_texts(members)])
            exact = {name: _exact(value) for name, value in settings.items()}
            lines.append({**exact, "n": len(numbers), **_means(members)})
        differing = table._differing_within(groups.values(), keys)
        if differing:
            notes.insert(0, f"Runs of one row differ in more than their seed: in {', '.join(differing)}.")
        if len(groups) < len(values):
            notes.insert(0, "Mean ± standard deviation of n runs.")
        frame = pd.DataFrame(lines)
        for name in map(str, outcomes):
            least = f"{name} least"
            if least in frame and (frame[least].eq(frame[name]) | frame[name].isna()).all():  # a range in no group
                frame = frame.drop(columns=least)
        return GroupTable(tuple(keys), frame, rows, notes)

    def _without_repeats(self) -> tuple[RunTable, list[str]]:
        """Each seeded run once: the same settings, seed and code give the same run, and no other draw of anything."""
        once: dict[Any, RunRow] = {}
        repeated = []
        for number, row in enumerate(self.rows):
            facts = [row.record.get(name) for name in ("config_hash", CODE, "versions", "foreign_code")]
            secure = bool((row.record["config"].get("strategy") or {}).get("secure"))
            run: Any = number if None in facts or secure else json.dumps(facts, sort_keys=True)
            if once.setdefault(run, row) is not row:
                repeated.append(str(row.folder))
        if not repeated:
            return self, []
        note = f"Of runs with the same settings, seed and code one counts; left out: {', '.join(repeated)}."
        return RunTable(tuple(once.values())), [note]

    def _differing_within(self, groups: Iterable[Sequence[int]], keys: Sequence[str]) -> list[str]:
        """Settings, and code, in which runs of one group differ."""
        differing: dict[str, None] = {}
        for numbers in groups:
            settings = [{**self.rows[number].without_seed, CODE: self.rows[number].code} for number in numbers]
            for name in dict.fromkeys(name for own in settings for name in own):
                if name not in ("objective", *keys) and len({str(own.get(name)) for own in settings}) > 1:
                    differing[name.removesuffix("._target_")] = None
        return list(differing)


# Outcomes


def _privacy_columns(privacies: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What runs guarantee, and what their audits and ledgers say of it."""
    columns: dict[str, list[Any]] = {}
    units = [privacy.get("unit") or ABSENT for privacy in privacies]
    if set(units) - {"example", ABSENT}:
        columns["unit"] = units
    for name in sorted({name for privacy in privacies for name in privacy["epsilon"]}, reverse=True):
        columns[f"epsilon ({name.upper()})"] = [_epsilon(privacy, name) for privacy in privacies]
    if any("audit" in privacy for privacy in privacies):
        columns[AUDITED_LABEL] = [audited_epsilon(privacy) for privacy in privacies]
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


def _kind(column: str) -> str:
    """How a column of outcomes is shown, and what stands for several runs: a range, words, or else a mean."""
    if column.startswith("epsilon ("):
        return "epsilon"
    if column in _ACCURACIES.values():
        return "percent"
    if column in _WORDS:
        return "words"
    return {AUDITED_LABEL: "limit", "steps": "steps", _TIME: "time"}.get(column, "metric")


def _texts(outcomes: pd.DataFrame) -> list[str]:
    """Outcomes of one or several runs as people read them, a cell for each column."""
    mark = _joined(_doubt_in(outcome) for _, outcome in outcomes.iterrows())
    return [_text(_kind(str(name)), values, mark) for name, values in outcomes.items()]


def _text(kind: str, values: pd.Series[Any], mark: str | None) -> str:
    if kind == "words":
        return _joined(map(str, values)) or ABSENT
    if kind in ("percent", "metric"):
        return mean_text(*mean_and_deviation(values), percent=kind == "percent")
    least, most = _extremes(values)
    if math.isnan(most):
        return marked(ABSENT, mark) if kind == "epsilon" else ABSENT
    if kind == "epsilon":
        return marked(" to ".join(dict.fromkeys([epsilon_text(least), epsilon_text(most)])), mark)
    return range_text([least, most], {"limit": ".3f", "time": ".1f", "steps": ".0f"}[kind])


def _means(outcomes: pd.DataFrame) -> dict[str, Any]:
    """The same as unrounded figures, by the columns of a frame of groups."""
    line: dict[str, Any] = {}
    for name, values in outcomes.items():
        kind = _kind(str(name))
        if kind == "words":
            line[str(name)] = _text(kind, values, None)
        elif kind in ("percent", "metric"):
            line[str(name)], line[f"{name} sd"] = mean_and_deviation(values)
        else:
            line[f"{name} least"], line[str(name)] = _extremes(values)
    return line


def _extremes(values: pd.Series[Any]) -> tuple[float, float]:
    """Least and largest; not a number where one is missing."""
    numbers = pd.to_numeric(values, errors="coerce")
    return numbers.min(skipna=False), numbers.max(skipna=False)


def _doubt_in(outcome: pd.Series[Any]) -> str | None:
    """What stands beside each epsilon of a row of outcomes."""
    if outcome.get("ledger", "intact") != "intact":
        return UNPROVEN
    return accusation(outcome.get("verdict"))


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [_finite({str(key): value for key, value in record.items()}) for record in frame.to_dict("records")]


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """With None for what is no finite number: JSON has no other."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


# Means


def mean_and_deviation(values: pd.Series[Any]) -> tuple[float, float]:
    """Mean and standard deviation (n − 1) over runs; not a number where one of them has none, or n is 1."""
    numbers = pd.to_numeric(values, errors="coerce")
    return float(numbers.mean(skipna=False)), float(numbers.std(skipna=False))


def _mean(rows: Sequence[RunRow]) -> RunRow:
    """Of metrics that all of them have, at steps at which all of them logged; of epsilons the largest."""
    first = rows[0]
    table = pd.DataFrame([dict(row.metrics) for row in rows], columns=list(first.metrics)).astype(float)
    largest = table.filter(regex="^privacy/")
    metrics = table.mean(skipna=False)
    metrics.update(largest.max(skipna=False))
    deviations = table.drop(columns=largest.columns).std(skipna=False)
    means = {}
    bands = {}
    for name in map(str, first.curves):
        if all(name in row.curves for row in rows):
            together = pd.concat([row.curves[name].dropna() for row in rows], axis=1, join="inner")
            means[name] = together.mean(axis=1)
            bands[name] = together.std(axis=1)
    name = first.name.rpartition(", seed ")[0] or first.name
    note = _joined(row.note for row in rows)
    seeds = ", ".join(str(row.settings.get("seed")) for row in rows)
    return replace(
        first,
        name=marked(f"{name} (n = {len(rows)})", note),
        settings=first.without_seed | unit_setting(first.settings.get(UNIT)) | {"seed": seeds},
        metrics=floats(metrics),
        curves=pd.DataFrame(means),
        folder=None,
        verdict=_joined(row.verdict for row in rows),
        note=note,
        n=len(rows),
        deviations=floats(deviations),
        bands=pd.DataFrame(bands),
    )


def _joined(words: Iterable[str | None]) -> str | None:
    """Each word once."""
    return ", ".join(dict.fromkeys(word for word in words if word is not None)) or None


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
        keys: As in `RunTable.group_by`.

    Raises:
        ConfigurationError: One of the folders holds no finished run, or no run has one of the keys.
    """
    table = RunTable.read(folders)
    unfinished = [run for folder in folders for run in unfinished_below(folder)]
    names = [f"{run} ({NOT_FINISHED}: {run.command('resume')})" for run in unfinished]
    groups = table.group_by(keys)
    return replace(groups, notes=[*groups.notes, *missing_note(names, len(table.rows) + len(names))])


def missing_note(names: Sequence[str], total: int) -> list[str]:
    """A note on runs that are in no row; none where all are there."""
    if not names:
        return []
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    are = "run is" if total == 1 else "runs is" if len(names) == 1 else "runs are"
    return [f"{len(names)} of {total} {are} missing: {'; '.join(names[:_MOST_NAMED])}{more}."]


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
