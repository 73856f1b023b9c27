"""`dpbench table --group-by`: mean and standard deviation over the seeds of runs that are alike in some settings."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.reports.audited import LABEL
from dpbench.reports.markdown import markdown_rows
from dpbench.reports.table import ACCURACIES, CANARIES, JUDGED, doubt_in, flat_settings, outcomes, read_runs
from dpbench.runs.command import choices_of
from dpbench.runs.folder import RunFolder, places_of

_APART = (CANARIES, JUDGED, "unit")  # in one row stand only runs that are alike in these
_NOT_METRICS = (*_APART, "verdict", "ledger", LABEL, "steps", "ms per step")
_CODE = "code_hash"
_ABSENT = "–"
_MOST_NAMED = 8

Records = Mapping[RunFolder, dict[str, Any]]


@dataclass(frozen=True)
class Groups:
    """Runs in groups.

    Attributes:
        keys: By which they are grouped.
        frame: A line for each group, with unrounded figures: the keys, n, mean and standard deviation (`... sd`) of
            each metric, the largest epsilon (and the least, `... least`, where a group has several).
        rows: The same as people read it, the headings first.
        notes: What a reader has to know of the rows.
    """

    keys: tuple[str, ...]
    frame: pd.DataFrame
    rows: list[list[str]]
    notes: list[str]

    @property
    def text(self) -> str:
        """The table in Markdown, and its notes."""
        return "\n".join([markdown_rows(self.rows, len(self.keys)), *(f"\n{note}" for note in self.notes)])


def keys_of(words: str) -> tuple[str, ...]:
    """Keys from "optimizer.lr,strategy".

    Raises:
        ConfigurationError: There is none.
    """
    keys = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    if not keys:
        raise ConfigurationError("--group-by names no key: --group-by optimizer.lr,strategy, say.")
    return keys


def grouped(folders: Sequence[Path], keys: Sequence[str]) -> Groups:
    """All finished runs below some folders, in groups; those that are not finished are named.

    Args:
        folders: Run folders, or folders of sweeps.
        keys: Dotted keys of the configuration, or groups of it (then by the name of the file that was chosen).

    Raises:
        ConfigurationError: There is no finished run in one of the folders, or none has one of the keys.
    """
    records = read_runs(folders)
    lost = [_unfinished(run) for folder in folders for run in unfinished_below(folder)]
    groups = group(records, keys)
    return Groups(groups.keys, groups.frame, groups.rows, [*groups.notes, *missing(lost, len(records) + len(lost))])


def unfinished_below(folder: Path) -> list[RunFolder]:
    """Runs below a folder that were begun and have no result: interrupted, failed, or still under way."""
    return [run for run in map(RunFolder, places_of(RunFolder.lock, folder)) if run.begun and not run.finished]


def _unfinished(run: RunFolder) -> str:
    return f"{run} (not finished: {run.command('resume')})"


def missing(names: Sequence[str], total: int) -> list[str]:
    """A note on runs that are in no row; none where all are there."""
    if not names:
        return []
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    are = "run is" if total == 1 else "runs is" if len(names) == 1 else "runs are"
    return [f"{len(names)} of {total} {are} missing: {'; '.join(names[:_MOST_NAMED])}{more}."]


def group(records: Records, keys: Sequence[str]) -> Groups:
    """Put runs into groups.

    Args:
        records: Of finished runs.
        keys: As in `grouped`.

    Raises:
        ConfigurationError: No run has one of the keys.
    """
    alone, notes = _without_repeats(records)
    runs, own = list(alone), list(alone.values())
    choices = [choices_of(run) for run in runs]
    flat = [flat_settings(record["config"], hidden=()) for record in own]
    values = {key: [_value(key, *one) for one in zip(own, choices, strict=True)] for key in keys}
    for key in keys:
        if all(value is _NOTHING for value in values[key]):
            names = {name for one in (*flat, *choices) for name in one}
            near = difflib.get_close_matches(key, names, 1)
            raise ConfigurationError(f"no run has a key {key}." + (f" Did you mean {near[0]}?" if near else ""))
    table = outcomes(own)
    apart = [name for name in _APART if name in table]
    named = [[*(values[key][i] for key in keys), *(table[name].iloc[i] for name in apart)] for i in range(len(own))]
    members: dict[str, list[int]] = {}
    for i, one in enumerate(named):
        members.setdefault(json.dumps([_shown(value) for value in one]), []).append(i)
    places = sorted(members.values(), key=lambda own: [_order(value) for value in named[own[0]]])
    lines = [_Line(dict(zip(keys, named[own[0]], strict=False)), table.iloc[own]) for own in places]
    notes = [*_of_spread(lines), *_of_differences(own, places, keys), *notes]
    return Groups(tuple(keys), _frame(lines, table), _rows(lines, table), notes)


def _without_repeats(records: Records) -> tuple[Records, list[str]]:
    """Each seeded run once: the same settings, seed and code give the same run, and no other draw of anything."""
    alone: dict[Any, RunFolder] = {}
    for run, record in records.items():
        facts = [record.get(name) for name in ("config_hash", _CODE, "versions", "foreign_code")]
        same = None in facts or bool((record["config"].get("strategy") or {}).get("secure"))
        alone.setdefault(run.path if same else json.dumps(facts, sort_keys=True), run)
    kept = {run: records[run] for run in alone.values()}
    twice = [str(run) for run in records if run not in kept]
    if not twice:
        return kept, []
    return kept, [f"Of runs with the same settings, seed and code one counts; left out: {', '.join(twice)}."]


class _Nothing:
    """What stands where a run does not have a key."""


_NOTHING = _Nothing()


def _value(key: str, record: Mapping[str, Any], choices: Mapping[str, str]) -> Any:
    if key in choices:
        return choices[key]
    found: Any = record["config"]
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return _NOTHING
        found = found[part]
    if isinstance(found, dict):  # a group, of a run that Hydra did not make
        return str(found.get("_target_", _ABSENT)).rpartition(".")[2]
    return found


def _shown(value: Any) -> str:
    if isinstance(value, _Nothing):
        return _ABSENT
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return f"{value:.15g}" if isinstance(value, float) else str(value)  # 1.0 is 1, which the next run may have said


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers first, by their size."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, _shown(value))


@dataclass(frozen=True)
class _Line:
    """One group: its values of the keys, and the outcomes of its runs."""

    values: Mapping[str, Any]
    runs: pd.DataFrame

    def spread(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a metric; of runs of which one has none, nothing."""
        column = pd.to_numeric(self.runs[name], errors="coerce")
        return column.mean(skipna=False), column.std(skipna=False)

    def extremes(self, name: str) -> tuple[float, float]:
        """Least and largest."""
        column = pd.to_numeric(self.runs[name], errors="coerce")
        return column.min(skipna=False), column.max(skipna=False)


def _metrics(table: pd.DataFrame) -> list[str]:
    return [name for name in map(str, table) if name not in _NOT_METRICS and not name.startswith("epsilon (")]


def _ranges(table: pd.DataFrame) -> list[str]:
    return [name for name in map(str, table) if name.startswith("epsilon (") or name in (LABEL, "steps")]


def _frame(lines: Sequence[_Line], table: pd.DataFrame) -> pd.DataFrame:
    found = []
    several = {name for name in _ranges(table) for line in lines if len(set(line.extremes(name))) > 1}
    for line in lines:
        cells = {key: _shown(value) if _order(value)[0] != 0 else value for key, value in line.values.items()}
        cells["n"] = len(line.runs)
        for name in map(str, table):
            if name in _metrics(table):
                cells[name], cells[f"{name} sd"] = line.spread(name)
            elif name in _ranges(table):
                least, cells[name] = line.extremes(name)
                cells |= {f"{name} least": least} if name in several else {}
            elif name != "ms per step":
                cells[name] = _words(line.runs[name])
        found.append(cells)
    return pd.DataFrame(found)


def _words(column: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(str, column)))


def _rows(lines: Sequence[_Line], table: pd.DataFrame) -> list[list[str]]:
    names = [name for name in map(str, table) if name != "ms per step"]
    keys = list(lines[0].values)
    rows = [[*keys, "n", *names]]
    for line in lines:
        marks = dict.fromkeys(mark for _, run in line.runs.iterrows() if (mark := doubt_in(run)) is not None)
        cells = [_brief(line.values[key]) for key in keys] + [str(len(line.runs))]
        for name in names:
            if name in _metrics(table):
                cells.append(_spread(*line.spread(name), percent=name in ACCURACIES.values()))
            elif name in _ranges(table):
                text = _range(*line.extremes(name), form=".0f" if name == "steps" else ".3f")
                cells.append(f"{text} ({', '.join(marks)})" if marks and name.startswith("epsilon (") else text)
            else:
                cells.append(_words(line.runs[name]))
        rows.append(cells)
    return rows


def _brief(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _shown(value)


def _spread(mean: float, deviation: float, percent: bool) -> str:
    if math.isnan(mean):
        return _ABSENT
    forms = (".2f", ".2f") if percent else (".4g", ".2g")
    return format(mean, forms[0]) + ("" if math.isnan(deviation) else f" ± {deviation:{forms[1]}}")


def _range(least: float, most: float, form: str) -> str:
    if math.isnan(most):
        return _ABSENT
    ends = [format(least, form), format(most, form)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _of_spread(lines: Sequence[_Line]) -> list[str]:
    return ["Mean ± standard deviation of n runs."] if any(len(line.runs) > 1 for line in lines) else []


def _without_seed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run, without its seed, and without what takes its value from there."""
    own = flat_settings(record["config"])
    return {
        name: value for name, value in own.items() if "seed" not in name.rsplit(".", 1)[-1] or value != record["seed"]
    }


def _of_differences(
    records: Sequence[Mapping[str, Any]], places: Iterable[Sequence[int]], keys: Sequence[str]
) -> list[str]:
    """In what else than the seed runs of one row differ."""
    differing: dict[str, None] = {}
    for own in places:
        settings = [_without_seed(records[i]) | {_CODE: records[i].get(_CODE)} for i in own]
        for name in {name: None for one in settings for name in one}:
            if name not in ("objective", *keys) and len({str(one.get(name)) for one in settings}) > 1:
                differing[name.removesuffix("._target_")] = None
    return [f"Runs of one row differ in more than their seed: in {', '.join(differing)}."] if differing else []
