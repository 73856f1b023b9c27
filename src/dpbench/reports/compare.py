"""`dpbench compare`: the settings in which runs differ, their metrics side by side, their curves in one picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.reports.audited import LABEL, audited_epsilon, doubt, verdict_of, without_accuracy
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reports.markdown import markdown_rows
from dpbench.reports.table import flat_settings
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.readers import read_csv, read_metrics
from dpbench.runs.record import read_result

_CELL = ("row", "column", "trial")
_WORDS = (*_CELL, "words", "metric", "unit", "*")
_UNIT = "unit of privacy"
_AUDITED = "privacy/audited_epsilon"
_STYLES = ("-", "--", ":", "-.")
_CURVES = (
    "val/accuracy", "test/accuracy", "nonprivate/train_loss", "nonprivate/discriminator_loss", "gan/generator_loss",
    "privacy/epsilon",
)  # fmt: skip


@dataclass(frozen=True)
class ComparedRun:
    """One run, or the mean of a table's cell.

    Attributes:
        name: Shown.
        settings: Its configuration, flat.
        metrics: Final figures.
        curves: What was logged, by step.
        whole: Whether the settings are all there are; a table's cell states only the words that made it.
        verdict: Of its audit; None without one.
    """

    name: str
    settings: dict[str, Any]
    metrics: Mapping[str, float | None]
    curves: pd.DataFrame = field(default_factory=pd.DataFrame)
    whole: bool = True
    verdict: str | None = None


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
    if (folder / "runs.csv").is_file():
        return _from_table(folder)
    folders = finished_runs_below([folder])
    if not folders:
        raise ConfigurationError(f"{source} holds no finished run ({RunFolder.result}) and no table (runs.csv).")
    runs = [_from_run(run) for run in folders]
    names = Counter(run.name for run in runs)
    return [
        replace(run, name=f"{run.name} ({own.path.name})") if names[run.name] > 1 else run
        for run, own in zip(runs, folders, strict=True)
    ]


def _from_run(folder: RunFolder) -> ComparedRun:
    record = read_result(folder)
    privacy = record["privacy"]
    metrics = {**without_accuracy(record), **{f"privacy/epsilon_{k}": v for k, v in privacy["epsilon"].items()}}
    metrics |= {_AUDITED: audited_epsilon(privacy)} if "audit" in privacy else {}
    curves = read_metrics(folder.metrics)
    name = marked(f"{record['config']['run']['name']}, seed {record['seed']}", doubt(privacy))
    settings = flat_settings(record["config"]) | _unit(privacy.get("unit"))
    return ComparedRun(name, settings, {**metrics, "seconds": record["seconds"]}, curves, verdict=verdict_of(privacy))


def marked(name: str, doubt: str | None) -> str:
    """The name of a run, with what speaks against its epsilon."""
    return name if doubt is None else f"{name} ({doubt})"


def _unit(unit: Any) -> dict[str, str]:
    """What epsilon is for, as a setting in which runs may differ."""
    return {} if unit is None or pd.isna(unit) else {_UNIT: str(unit)}


def _from_table(folder: Path) -> list[ComparedRun]:
    """A cell's settings are the words that made it; its metrics and curves are means over seeds."""
    found, logged = [], folder / "curves.csv"
    restore = "restore {path}, or make it again (dpbench reproduce)"
    names = ["step", "value"]
    curves = pd.DataFrame(columns=["row", "column", *names])
    if logged.is_file():
        curves = read_csv(logged, ["row", "column", *names], restore, (*_CELL, "*"))
    figures = ["value", "seconds", "epsilon_rdp", "epsilon_pld"]
    cells = read_csv(folder / "runs.csv", ["row", "column", "words", "metric", *figures], restore, _WORDS)
    by = [name for name in _CELL if name in cells]
    for cell, own in cells.groupby(by, sort=False):
        words = [word for word in str(own["words"].iloc[0]).split() if not word.startswith(("seed=", "run.", "logger"))]
        settings = dict(word.partition("=")[::2] for word in words)
        settings |= _unit(own["unit"].iloc[0]) if "unit" in own else {}
        more = {name: pd.to_numeric(own[name], errors="coerce").mean() for name in map(str, own) if "/" in name}
        metrics = {str(own["metric"].iloc[0]): own["value"].mean(), **more, "seconds": own["seconds"].mean()}
        metrics |= {f"privacy/epsilon_{name}": own[f"epsilon_{name}"].max() for name in ("rdp", "pld")}
        places = [curves[name] == part for name, part in zip(by, cell, strict=True) if name in curves]
        curve = curves[np.logical_and.reduce(places)].groupby("step")[["value"]].mean()
        curve = pd.DataFrame() if curve.empty else curve.rename(columns={"value": str(own["metric"].iloc[0])})
        found.append(
            ComparedRun(f"{', '.join(map(str, cell))} (n = {len(own)})", settings, metrics, curve, whole=False)
        )
    return found


def compare(runs: Sequence[ComparedRun]) -> str:
    """Runs as columns; settings that differ and metrics as lines, in Markdown."""
    keys = {key: None for run in runs for key in run.settings}
    alike = len({run.whole for run in runs}) == 1  # else what a cell does not state is not known
    stated = {key: [run.settings.get(key, "–") for run in runs if alike or key in run.settings] for key in keys}
    differing = [key for key, values in stated.items() if len(set(map(str, values))) > 1]
    names = {key: None for run in runs for key in run.metrics if "/" in key or key == "seconds"}
    hidden = {key for key in names if key.startswith("privacy/audited_")} - {_AUDITED}  # which only wandb has
    names = {key: None for key in names if key not in hidden}
    lines = [["", *(run.name for run in runs)]]
    lines += [[key, *(str(run.settings.get(key, "–")) for run in runs)] for key in differing]
    labels = {key: LABEL if key == _AUDITED else key for key in names}
    lines += [[label, *(_figure(key, run.metrics.get(key)) for run in runs)] for key, label in labels.items()]
    if any(run.verdict is not None for run in runs):
        lines.append(["verdict of the audit", *(run.verdict or "–" for run in runs)])
    return markdown_rows(lines)


def _figure(key: str, value: float | None) -> str:
    if value is None or pd.isna(value):
        return "–"
    return f"{100 * value:.2f} %" if "accuracy" in key else f"{value:.4g}"


def draw(runs: Sequence[ComparedRun], path: Path) -> Path | None:
    """All curves of each kind in one panel; None where no run has any."""
    shown = [name for name in _CURVES if any(name in run.curves for run in runs)]
    if not shown:
        return None
    figure = new_figure(8, 1 + 2.4 * len(shown))
    for axes, name in zip(figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0], shown, strict=True):
        for number, run in enumerate(runs):
            if name in run.curves:
                values = run.curves[name].dropna()
                marker = "." if len(values) < 5 else None
                look = {"color": f"C{number % 10}", "linestyle": _STYLES[number // 10 % len(_STYLES)]}
                axes.plot(values.index, values, label=run.name, marker=marker, **look)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    figure.axes[-1].set_xlabel("step")
    figure.axes[0].legend(fontsize=7)
    return write_figure(path, figure)
