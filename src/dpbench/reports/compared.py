"""Runs and tables' cells that are compared: read, put together over their seeds, and told apart in few words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.reports.audited import audited_epsilon, verdict_of, without_accuracy
from dpbench.reports.table import flat_settings
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.readers import read_csv, read_metrics
from dpbench.runs.record import doubt, read_result

TABLE, CURVES = "runs.csv", "curves.csv"  # of a table's results
AUDITED = "privacy/audited_epsilon"
EPSILON = "privacy/epsilon"  # after so many steps, as the run logged it
_CELL = ("row", "column", "trial")
_WORDS = (*_CELL, "words", "metric", "unit", "*")
_UNIT = "unit of privacy"
_LONGEST = 80  # letters of a legend's line
_ABSENT = "–"
_NAMES = ("_target_", "name")  # whose values say what they are


@dataclass(frozen=True)
class ComparedRun:
    """One run, or the mean over the seeds of several, or of a table's cell.

    Attributes:
        name: Shown.
        settings: Its configuration, flat.
        metrics: Final figures.
        curves: What was logged, by step.
        whole: Whether the settings are all there are; a table's cell states only the words that made it.
        verdict: Of its audit; None without one.
        note: What a reader has to know of it wherever it is shown.
        code: Hash of the code that made it, if it is known.
        n: Number of runs of which it is the mean.
        deviations: Standard deviations of metrics over them.
        bands: The same of curves.
    """

    name: str
    settings: dict[str, Any]
    metrics: Mapping[str, float | None]
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    whole: bool = True
    verdict: str | None = None
    note: str | None = None
    code: str | None = None
    n: int = 1
    deviations: Mapping[str, float] = field(default_factory=dict)
    bands: pd.DataFrame = field(default_factory=pd.DataFrame)


def load(source: str) -> list[ComparedRun]:
    """Read the runs of a source.

    Args:
        source: Folder of a run or a sweep, or of a table's results.

    Raises:
        ConfigurationError: There is nothing.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ConfigurationError(f"{source} is {'a file' if folder.exists() else 'not there'}: name a folder.")
    if (folder / TABLE).is_file():
        return from_table(folder)
    folders = finished_runs_below([folder])
    if not folders:
        raise ConfigurationError(f"{source} holds no finished run ({RunFolder.result}) and no table ({TABLE}).")
    return told_apart([from_record(run, read_result(run)) for run in folders], [run.path.name for run in folders])


def told_apart(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[ComparedRun]:
    """Runs of one name with the names of their folders."""
    same = Counter(run.name for run in runs)
    return [
        replace(run, name=f"{run.name} ({own})") if same[run.name] > 1 else run
        for run, own in zip(runs, names, strict=True)
    ]


def from_record(folder: RunFolder, record: Mapping[str, Any]) -> ComparedRun:
    """A run with its curves, from what result.json holds of it."""
    privacy = record["privacy"]
    metrics = {**without_accuracy(record), **{f"privacy/epsilon_{k}": v for k, v in privacy["epsilon"].items()}}
    metrics |= {AUDITED: audited_epsilon(privacy)} if "audit" in privacy else {}
    name = marked(f"{record['config']['run']['name']}, seed {record['seed']}", doubt(privacy))
    settings = flat_settings(record["config"]) | _unit(privacy.get("unit"))
    metrics |= {"seconds": record["seconds"]}
    curves, code, verdict = read_metrics(folder.metrics), record.get("code_hash"), verdict_of(privacy)
    return ComparedRun(name, settings, metrics, curves, verdict=verdict, note=doubt(privacy), code=code)


def marked(name: str, doubt: str | None) -> str:
    """The name of a run, with what speaks against its epsilon."""
    return name if doubt is None else f"{name} ({doubt})"


def _unit(unit: Any) -> dict[str, str]:
    """What epsilon is for, as a setting in which runs may differ."""
    return {} if unit is None or pd.isna(unit) else {_UNIT: str(unit)}


def from_table(folder: Path) -> list[ComparedRun]:
    """A cell's settings are the words that made it; its metrics and curves are means over seeds.

    Raises:
        ConfigurationError: A file is damaged.
    """
    found, logged = [], folder / CURVES
    restore = "restore {path}, or make it again (dpbench reproduce)"
    names = ["step", "value"]
    curves = pd.DataFrame(columns=["row", "column", *names])
    if logged.is_file():
        curves = read_csv(logged, ["row", "column", *names], restore, (*_CELL, "*"))
    figures = ["value", "seconds", "epsilon_rdp", "epsilon_pld"]
    cells = read_csv(folder / TABLE, ["row", "column", "words", "metric", *figures], restore, _WORDS)
    by = [name for name in _CELL if name in cells]
    for cell, own in cells.groupby(by, sort=False):
        places = [curves[name] == part for name, part in zip(by, cell, strict=True) if name in curves]
        found.append(_cell(", ".join(map(str, cell)), own, curves[np.logical_and.reduce(places)]))
    return found


def _cell(name: str, own: pd.DataFrame, curves: pd.DataFrame) -> ComparedRun:
    words = [word for word in str(own["words"].iloc[0]).split() if not word.startswith(("seed=", "run.", "logger"))]
    settings = dict(word.partition("=")[::2] for word in words)
    settings |= _unit(own["unit"].iloc[0]) if "unit" in own else {}
    metric = str(own["metric"].iloc[0])
    numbers = {metric: own["value"], "seconds": own["seconds"]}
    numbers |= {column: pd.to_numeric(own[column], errors="coerce") for column in map(str, own) if "/" in column}
    metrics = {key: values.mean() for key, values in numbers.items()}
    metrics |= {f"privacy/epsilon_{key}": own[f"epsilon_{key}"].max() for key in ("rdp", "pld")}
    grouped = curves.groupby("step")[["value"]]
    mean, spread = (pd.DataFrame() if curves.empty else one for one in (grouped.mean(), grouped.std()))
    title = {"value": metric}
    return ComparedRun(
        f"{name} (n = {len(own)})",
        settings,
        metrics,
        mean.rename(columns=title),
        whole=False,
        n=len(own),
        deviations={key: values.std() for key, values in numbers.items()} if len(own) > 1 else {},
        bands=spread.rename(columns=title),
    )


def over_seeds(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Mean and standard deviation of runs that differ by their seed only, each group in the place of its first run."""
    groups: dict[str, list[ComparedRun]] = {}
    for number, run in enumerate(runs):
        kind = [without_seed(run.settings), run.code] if run.whole else number  # cells are means already
        groups.setdefault(json.dumps(kind, sort_keys=True, default=str), []).append(run)
    return [_mean(own) if len(own) > 1 else own[0] for own in groups.values()]


def without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings but for the seed, and for what takes its value from there."""
    seed = settings.get("seed")
    return {key: value for key, value in settings.items() if "seed" not in key.rsplit(".", 1)[-1] or value != seed}


def _mean(runs: Sequence[ComparedRun]) -> ComparedRun:
    """Of metrics that all of them have, at steps at which all of them logged; of epsilons the largest."""
    names = [name for name in runs[0].metrics if all(run.metrics.get(name) is not None for run in runs)]
    table = pd.DataFrame([{name: run.metrics[name] for name in names} for run in runs]).astype(float)
    largest = [name for name in names if name.startswith("privacy/")]
    metrics: dict[str, float | None] = dict.fromkeys(runs[0].metrics)
    metrics |= {str(name): float(value) for name, value in table.mean().items()}
    metrics |= {name: float(table[name].max()) for name in largest}
    means, bands = {}, {}
    for name in map(str, runs[0].curves):
        if all(name in run.curves for run in runs):
            together = pd.concat([run.curves[name].dropna() for run in runs], axis=1, join="inner")
            means[name], bands[name] = together.mean(axis=1), together.std(axis=1)
    verdicts = dict.fromkeys(run.verdict for run in runs if run.verdict is not None)
    name = runs[0].name.rpartition(", seed ")[0] or runs[0].name
    notes = dict.fromkeys(run.note for run in runs if run.note is not None)
    seeds = {"seed": ", ".join(str(run.settings.get("seed")) for run in runs)}
    deviations = {str(key): float(value) for key, value in table.std().items() if key not in largest}
    return replace(
        runs[0],
        name=marked(f"{name} (n = {len(runs)})", ", ".join(notes) or None),
        settings=without_seed(runs[0].settings) | seeds,
        metrics=metrics,
        curves=pd.DataFrame(means),
        verdict=", ".join(verdicts) or None,
        note=", ".join(notes) or None,
        n=len(runs),
        deviations=deviations,
        bands=pd.DataFrame(bands),
    )


def differing_settings(runs: Sequence[ComparedRun]) -> list[str]:
    """Keys in which runs differ."""
    keys = {key: None for run in runs for key in run.settings}
    alike = len({run.whole for run in runs}) == 1  # else what a cell does not state is not known
    stated = {key: [run.settings.get(key, _ABSENT) for run in runs if alike or key in run.settings] for key in keys}
    return [key for key, values in stated.items() if len(set(map(str, values))) > 1]


def telling_settings(runs: Sequence[ComparedRun]) -> list[str]:
    """As few keys as tell apart all runs that differ: those first that every run sets, classes before their options."""
    own = {key for run in runs for key in without_seed(run.settings)} - {"seed", _UNIT}
    keys = [key for key in differing_settings(runs) if key in own]
    keys.sort(key=lambda key: (any(run.settings.get(key) is None for run in runs), not key.endswith(_NAMES)))
    told, chosen = 1, list[str]()
    for key in [*keys, "seed"]:
        kinds = {tuple(str(run.settings.get(one, _ABSENT)) for one in (*chosen, key)) for run in runs}
        if len(kinds) > told:
            told, chosen = len(kinds), [*chosen, key]
    return chosen


def labels(runs: Sequence[ComparedRun]) -> list[str]:
    """What tells each run from the others, for a legend; its name where that is too long, or not enough."""
    keys = telling_settings(runs)
    short = _short_names(keys)
    found = []
    for run in runs:
        parts = [_said(short[key], run.settings[key]) for key in keys if run.settings.get(key) is not None]
        text = marked(", ".join(parts) + (f" (n = {run.n})" if run.n > 1 else ""), run.note)
        found.append(text if parts and len(text) <= _LONGEST else run.name)
    cells = not all(run.whole for run in runs)  # which have names that people gave them
    return [run.name for run in runs] if cells or len(set(found)) < len(found) else found


def stated_differences(runs: Sequence[ComparedRun]) -> list[str]:
    """Keys in which runs that have them differ: not those that only some strategies have, and then alike."""
    values = {key: {str(run.settings[key]) for run in runs if key in run.settings} for key in differing_settings(runs)}
    return [key for key, several in values.items() if len(several) > 1]


def _said(name: str, value: Any) -> str:
    """Such as lr=0.1; of a class, or of data, the name alone."""
    return str(value) if name.endswith(_NAMES) else f"{name}={value}"


def _short_names(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, where no other has it."""
    keys = list(keys)
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return {key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in keys}
