"""`dpbench compare`: the settings in which runs differ, their metrics side by side, their curves in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from dpbench.reports.audited import LABEL
from dpbench.reports.compared import AUDITED, EPSILON, ComparedRun, differing_settings, labels
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reports.markdown import markdown_rows

Axis = Literal["step", "epsilon"]
_STYLES = ("-", "--", ":", "-.")
_MEASURED = ("val/", "test/")
_CURVES = ("nonprivate/train_loss", "nonprivate/discriminator_loss", "gan/generator_loss", EPSILON)
X_LABELS = {"step": "step", "epsilon": "ε spent (RDP)"}


def compare(runs: Sequence[ComparedRun]) -> str:
    """Runs as columns; settings that differ and metrics as lines, in Markdown."""
    return markdown_rows(compared_rows(runs))


def compared_rows(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """The cells of that table, the names first."""
    lines = [["", *(run.name for run in runs)]]
    lines += [[key, *(str(run.settings.get(key, "–")) for run in runs)] for key in differing_settings(runs)]
    return lines + metric_rows(runs)


def metric_rows(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Final figures, a line for each."""
    names = {key: None for run in runs for key in run.metrics if "/" in key or key == "seconds"}
    hidden = {key for key in names if key.startswith("privacy/audited_")} - {AUDITED}  # which only wandb has
    shown = {key: LABEL if key == AUDITED else key for key in names if key not in hidden}
    lines = [[label, *(_figure(key, run) for run in runs)] for key, label in shown.items()]
    if any(run.verdict is not None for run in runs):
        lines.append(["verdict of the audit", *(run.verdict or "–" for run in runs)])
    return lines


def _figure(key: str, run: ComparedRun) -> str:
    value, spread = run.metrics.get(key), run.deviations.get(key)
    if value is None or pd.isna(value):
        return "–"
    known = spread is not None and not pd.isna(spread)
    if "accuracy" in key:
        return f"{100 * value:.2f}{f' ± {100 * spread:.2f}' if known and spread is not None else ''} %"
    return f"{value:.4g}{f' ± {spread:.2g}' if known else ''}"


def curve_names(runs: Sequence[ComparedRun]) -> list[str]:
    """What runs logged and a comparison draws: what was measured, losses, epsilon."""
    logged = [str(name) for run in runs for name in run.curves if run.curves[name].notna().any()]
    measured = [name for part in _MEASURED for name in sorted(set(logged)) if name.startswith(part)]
    return [*measured, *(name for name in _CURVES if name in logged)]


def draw(runs: Sequence[ComparedRun], path: Path, axis: Axis = "step") -> Path | None:
    """All curves of each kind in one panel; None where no run has any.

    Args:
        runs: Which.
        path: The picture.
        axis: What is drawn to the right: steps, or the epsilon that they had spent.
    """
    shown = [name for name in curve_names(runs) if axis == "step" or has_epsilon(runs, name)]
    if not shown:
        return None
    figure = new_figure(8, 1 + 2.4 * len(shown))
    names = labels(runs) if len(runs) > 1 else [run.name for run in runs]
    for axes, name in zip(figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0], shown, strict=True):
        draw_panel(axes, runs, name, axis, names)
        axes.set_ylabel(name)
    figure.axes[-1].set_xlabel(X_LABELS[axis])
    figure.axes[0].legend(fontsize=7)
    return write_figure(path, figure)


def has_epsilon(runs: Sequence[ComparedRun], name: str) -> bool:
    """Whether any run has a curve that can be drawn over epsilon."""
    return name != EPSILON and any(not _curve(run, name, "epsilon")[0].empty for run in runs)


def draw_panel(
    axes: Axes, runs: Sequence[ComparedRun], name: str, axis: Axis, names: Sequence[str], most: int | None = None
) -> None:
    """One curve of each run that has it, with a band of one standard deviation where it is a mean.

    Args:
        axes: Where to.
        runs: Which; the color of each is that of its place.
        name: Of the curve.
        axis: As in `draw`.
        names: For the legend.
        most: Points of a curve; of more, means of neighbors are drawn.
    """
    for number, run in enumerate(runs):
        if name not in run.curves:
            continue
        values, band = _curve(run, name, axis)
        values, band = (_thinned(one, most) for one in (values, band))
        if values.empty:
            continue
        color, style = f"C{number % 10}", _STYLES[number // 10 % len(_STYLES)]
        marker = "." if len(values) < 5 else None
        axes.plot(values.index, values, label=names[number], marker=marker, color=color, linestyle=style, linewidth=1.4)
        if band.notna().any():
            axes.fill_between(values.index, values - band, values + band, color=color, alpha=0.2, linewidth=0)
    if "accuracy" in name:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)


def _curve(run: ComparedRun, name: str, axis: Axis) -> tuple[pd.Series[float], pd.Series[float]]:
    """A run's curve and its standard deviation; over epsilon where the run knows it for these steps."""
    if name not in run.curves:
        return pd.Series(dtype=float), pd.Series(dtype=float)
    values = run.curves[name].dropna()
    band = run.bands[name].reindex(values.index) if name in run.bands else pd.Series(np.nan, values.index)
    if axis == "step":
        return values, band
    spent = run.curves[EPSILON].dropna() if EPSILON in run.curves else pd.Series(dtype=float)
    if spent.empty:
        return values.iloc[:0], band.iloc[:0]
    known = (values.index >= spent.index.min()) & (values.index <= spent.index.max())
    at = pd.Index(np.interp(values.index[known], spent.index, spent), name="epsilon")
    return values[known].set_axis(at), band[known].set_axis(at)


def _thinned(values: pd.Series[float], most: int | None) -> pd.Series[float]:
    if most is None or len(values) <= most:
        return values
    size = -(-len(values) // most)
    places = np.arange(len(values)) // size
    means = pd.Series(values.to_numpy(), index=pd.Index(values.index, name="at")).reset_index().groupby(places).mean()
    return means.set_index("at").iloc[:, 0]
