"""Runs side by side: one row per run, with its settings, figures, epsilons, and doubts about them.

It is the basis of `dpbench table`, `compare` and `report`, of the end of a sweep, and of the tables of papers;
`reports.groups` groups runs that agree in some settings.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.harness.reports.markdown import latex_rows, markdown_rows
from dpbench.harness.reports.run_rows import (
    AUDITED,
    CODE,
    MISSING,
    STEPS,
    TIME,
    UNIT,
    RunRow,
    grouped,
    joined,
    keys_of_any,
    marked,
    require_folder,
    row_of,
    seed_keys,
    unit_setting,
    varying,
    without_seeds,
)
from dpbench.harness.runs.folder import RunFolder, finished_runs_below, unfinished_runs_below
from dpbench.harness.runs.metrics_log import better_direction
from dpbench.harness.runs.numbers import ABSENT, epsilon_text, mean_text, metric_text
from dpbench.harness.runs.record import MEASURED

CLASS = "._target_"
"""Suffix of the key with the class of an object."""
EPSILON = "privacy/epsilon"
"""ε by RDP after so many steps, as a run logs it."""
AUDITED_LABEL = "audited epsilon (95 %)"

_EPSILON_BY = "privacy/epsilon_"
_ACCURACIES = {
    "val/accuracy": "validation accuracy (%)",
    "test/accuracy": "test accuracy (%)",
    "evaluation/accuracy_cnn": "accuracy of a CNN on synthetic images (%)",
}
_PLAIN = {ABSENT, "example", "test", "intact"}  # words that go without saying
_FORMS = {AUDITED: ".3f", TIME: ".1f", STEPS: ".0f"}
_LONGEST = 80  # letters of a legend's line
_MOST_COLUMNS = 8  # runs beside one another; more stand below one another
_MOST_NAMED = 8  # runs in a note


@dataclass(frozen=True)
class RunTable:
    """Runs or means of runs, each with its settings and figures.

    Attributes:
        rows: The rows, in the order in which they are shown.
        keys: Settings by which runs were grouped; None shows single runs, with the settings in which they differ.
        notes: Notes on the rows, such as runs that are left out.
    """

    rows: tuple[RunRow, ...]
    keys: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, sources: Sequence[Path], curves: bool = False) -> RunTable:
        """Read all finished runs below some folders, in the order of the folders.

        Args:
            sources: Folders of runs, or of sweeps.
            curves: True to read the runs' logged metrics, too.

        Raises:
            ConfigurationError: One of the folders holds no finished run, or a file is damaged.
        """
        folders: dict[RunFolder, None] = {}
        for source in sources:  # each: one that is mistyped must not be left out silently
            require_folder(source)
            below = finished_runs_below([source])
            if not below:
                raise ConfigurationError(f"no finished run (with a {RunFolder.result}) below the folder {source}.")
            folders.update(dict.fromkeys(below))
        rows = [row_of(folder, curves) for folder in folders]
        names = Counter(row.name for row in rows)
        for number, row in enumerate(rows):
            if names[row.name] > 1:  # told apart by its folder
                rows[number] = replace(row, name=f"{row.name} ({row.folder})")
        return cls(tuple(rows), notes=unfinished_notes(sources, len(rows)))

    # Settings

    def differing(self) -> list[str]:
        """Keys in which those runs differ that have them; of keys that follow the seed the seed alone."""
        follow = seed_keys(self.rows) - {"seed"}
        return [key for key in varying(row.settings for row in self.rows) if key not in follow]

    def _values(self, key: str) -> list[Any]:
        """Values of a setting; of a class the words that chose it on the command line, where these tell runs apart."""
        values = [row.settings.get(key) for row in self.rows]
        if key.endswith(CLASS):
            words = [row.lookup(key.removesuffix(CLASS)) for row in self.rows]
            if len({*map(str, words)}) >= len({*map(str, values)}):
                return words
        return values

    def labels(self) -> list[str]:
        """Settings that tell each run from the others, for a legend; its name if these are too long or not enough."""
        keys = [key for key in self.differing() if key not in (UNIT, "seed")]
        for names in (keys, [*keys, "seed"]):  # the seed where it takes that, too
            settings = zip(*(_assignments(name, self._values(name)) for name in names), strict=True)
            labels = []
            for row, parts in zip(self.rows, settings, strict=bool(names)):
                count = f" (n = {row.n})" if row.n > 1 else ""
                label = marked(", ".join(filter(None, parts)) + count, row.note)
                labels.append(label if any(parts) and len(label) <= _LONGEST else row.name)
            if len(set(labels)) == len(self.rows) > 1:
                return labels
        return [row.name for row in self.rows]

    def knows(self, key: str) -> bool:
        """Return whether any run has a key."""
        return any(row.lookup(key) is not MISSING for row in self.rows)

    def _figures(self, wide: bool) -> dict[str, str]:
        """The metrics that a row shows, and their headings: accuracies of classifiers, all metrics of others."""
        logged = keys_of_any(row.metrics for row in self.rows)
        of_privacy = [name for name in logged if name.startswith("privacy/") and name != EPSILON]
        shown = [name for name in _ACCURACIES if any(row.metrics.get(name) is not None for row in self.rows)]
        if not shown:
            shown = sorted((name for name in logged if name.startswith(MEASURED)), reverse=True)
        # What a sweep chose by is shown, whatever else is.
        shown += sorted({name for row in self.rows for name in row.objectives})
        if wide:
            shown += [name for name in logged if "/" in name and not name.startswith("privacy/")]
        shown += sorted((name for name in of_privacy if name.startswith(_EPSILON_BY)), reverse=True)
        if wide:
            shown += of_privacy
        last = [AUDITED, "seconds" if wide else TIME, STEPS] if self.keys is None else [AUDITED, STEPS]
        shown += [name for name in last if name in logged]
        return {name: _heading(name) for name in shown}

    def _names(self, folders: bool, wide: bool) -> dict[str, list[Any]]:
        """The columns to the left of the figures: the run's name, its settings, and words that tell runs apart."""
        names: dict[str, list[Any]] = {}
        if self.keys is None:
            names["run"] = [row.name if wide else row.record["config"]["run"]["name"] for row in self.rows]
            if folders:
                names["folder"] = [str(row.folder) for row in self.rows]
            for key in self.differing():
                if key != UNIT:
                    names[key.removesuffix(CLASS)] = [_shown(value) for value in self._values(key)]
        else:
            for key in self.keys:
                names[key] = [_shown(row.lookup(key)) for row in self.rows]
            names["n"] = [row.n for row in self.rows]
        for word in keys_of_any(row.words for row in self.rows):
            words = [row.words[word] for row in self.rows]
            if set(words) - _PLAIN:
                names[word] = words
        return names

    def frame(self, folders: bool = False, wide: bool = False) -> pd.DataFrame:
        """A row for each run or mean, unrounded: its names and settings, and its figures (`... sd`: deviations).

        Args:
            folders: Add a column that says where each run lies.
            wide: Show all figures that were logged.
        """
        columns = self._names(folders, wide)
        for name, heading in self._figures(wide).items():
            columns[heading] = [_scaled(name, row.metrics) for row in self.rows]
            if any(name in row.deviations for row in self.rows) and name not in _FORMS:
                columns[f"{heading} sd"] = [_scaled(name, row.deviations) for row in self.rows]
        return pd.DataFrame(columns)

    def texts(self, folders: bool = False, wide: bool = False) -> list[list[str]]:
        """The frame as text: headings, then a line for each row, with the doubts about each epsilon."""
        columns = []
        for heading, values in self._names(folders, wide).items():
            columns.append([heading, *(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)])
        for name, heading in self._figures(wide).items():
            columns.append([heading, *(_figure_text(name, row) for row in self.rows)])
        return [list(line) for line in zip(*columns, strict=True)]

    def best_note(self) -> tuple[str, ...]:
        """One line that names the run that is best by validation; none of fewer than two, or of equal ones.

        The metric is the objective of a sweep if it is of validation data, else the accuracy, else the first of which
        is known whether more or less is better.
        """
        objectives = {row.objectives for row in self.rows}
        logged = sorted(keys_of_any(row.metrics for row in self.rows))
        for name in (*(objectives.pop() if len(objectives) == 1 else ()), "val/accuracy", *logged):
            values = pd.Series([row.metrics.get(name) for row in self.rows], dtype=float)
            direction = better_direction(name)
            if direction is None or values.isna().all():
                continue
            if values.nunique() < 2:
                return ()
            row = self.rows[int(values.argmax() if direction == "max" else values.argmin())]
            return (f"Best by {name}: {row.folder or row.name} ({metric_text(name, row.metrics[name])}).",)
        return ()

    def to_markdown(self, folders: bool = False) -> str:
        """The table as text, words to the left and numbers to the right, and its notes as paragraphs."""
        notes = self.notes if self.keys is not None else (*self.best_note(), *self.notes)
        names = self._names(folders, wide=False).values()
        with_words = [
            number
            for number, values in enumerate(names)
            if any(isinstance(value, str) and value != ABSENT for value in values)
        ]
        return "\n\n".join([markdown_rows(self.texts(folders), with_words), *notes])

    def to_latex(self, folders: bool = False) -> str:
        """The table as text, in LaTeX (booktabs)."""
        return latex_rows(self.texts(folders))

    def to_csv(self, folders: bool = False) -> str:
        """The frame, unrounded."""
        return str(self.frame(folders).to_csv(index=False))

    def to_records(self, folders: bool = False, wide: bool = False) -> list[dict[str, Any]]:
        """A dictionary for each row, fit for JSON: figures that are missing or infinite are None."""
        frame = self.frame(folders, wide).rename(columns=str).replace([math.inf, -math.inf], math.nan)
        records: list[dict[str, Any]] = frame.astype(object).where(frame.notna(), None).to_dict("records")  # type: ignore[assignment]
        return records

    def compared_rows(self) -> list[list[str]]:
        """All figures, of few runs side by side, of many runs below one another."""
        rows = self.texts(wide=True)
        return rows if len(self.rows) > _MOST_COLUMNS else [list(line) for line in zip(*rows, strict=True)]

    def compare(self) -> str:
        """`compared_rows` in Markdown."""
        return markdown_rows(self.compared_rows())

    def over_seeds(self) -> RunTable:
        """Mean and standard deviation of runs that differ by their seed only, each group in the place of its first."""
        return replace(self, rows=tuple(map(mean, self.groups_of_seeds())))

    def groups_of_seeds(self) -> list[list[RunRow]]:
        """Runs that differ by their seed only, together; the groups in the order of their first runs."""
        kinds = []
        for row, settings in zip(self.rows, without_seeds(self.rows), strict=True):
            kind = [settings, row.settings.get(UNIT), row.record.get(CODE)]
            kinds.append(json.dumps(kind, sort_keys=True, default=str))
        return list(grouped(self.rows, kinds).values())


def _shown(value: Any) -> Any:
    """A value of a setting, as a cell."""
    return ABSENT if value is MISSING or value is None else value


def _assignments(key: str, values: Iterable[Any]) -> list[str]:
    """A setting with each of its values, for a legend; empty where there is none."""
    name = key.removesuffix(CLASS).rpartition(".")[2]
    return ["" if value is None or value is MISSING else f"{name}={value}" for value in values]


def _heading(name: str) -> str:
    """The heading of a metric; accuracies, which are shares, are shown in percent."""
    if name == AUDITED:
        return AUDITED_LABEL
    if name.startswith(_EPSILON_BY):
        return f"epsilon ({name.removeprefix(_EPSILON_BY).upper()})"
    return _ACCURACIES.get(name, f"{name} (%)" if "accuracy" in name else name)


def _scaled(name: str, figures: Mapping[str, float | None]) -> float:
    """A figure as a table shows it; not a number where there is none."""
    value = figures.get(name)
    if value is None:
        return math.nan
    return 100 * value if "accuracy" in name else value


def _figure_text(name: str, row: RunRow) -> str:
    value = _scaled(name, row.metrics)
    if name.startswith(_EPSILON_BY):
        return marked(epsilon_text(value), row.note)
    if name in _FORMS:
        return ABSENT if math.isnan(value) else format(value, _FORMS[name])
    return mean_text(value, _scaled(name, row.deviations), percent="accuracy" in name)


def mean(rows: Sequence[RunRow]) -> RunRow:
    """The mean of several runs, with the record and folder of the first; a single one is returned as it is.

    Metrics are those that all of them have, at steps at which all of them logged; of epsilons the largest stands.
    """
    first = rows[0]
    if len(rows) == 1:
        return first
    figures = pd.DataFrame([dict(row.metrics) for row in rows], columns=list(first.metrics)).astype(float)
    # A mean of epsilons would hold for none of the runs; the largest holds for each.
    largest = figures.filter(regex="^privacy/").max(skipna=False)
    deviations = figures.drop(columns=largest.index).std(skipna=False)
    curves = pd.concat([row.curves for row in rows]).groupby(level=0)
    # At steps that all of them logged: elsewhere a mean would jump where one curve begins or ends.
    is_common = curves.count() == len(rows)
    note = joined(row.note for row in rows)
    seeds = ", ".join(str(row.settings.get("seed")) for row in rows)
    return replace(
        first,
        name=marked(f"{first.name.rpartition(', seed ')[0]} (n = {len(rows)})", note),
        settings=without_seeds(rows)[0] | unit_setting(first.settings.get(UNIT)) | {"seed": seeds},
        metrics={**figures.mean(skipna=False), **largest},
        curves=curves.mean().where(is_common),
        words={word: joined(row.words[word] for row in rows) or ABSENT for word in first.words},
        note=note,
        n=len(rows),
        deviations={**deviations},
        bands=curves.std().where(is_common),
    )


def unfinished_notes(folders: Sequence[Path], finished: int) -> tuple[str, ...]:
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
        return ()
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (f"{len(names)} of {finished + len(names)} runs are not finished: {'; '.join(names[:_MOST_NAMED])}{more}.",)
