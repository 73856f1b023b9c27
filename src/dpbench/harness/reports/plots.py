"""Curves of runs, alone or side by side, and the diagnostics of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dpbench.harness.reports.figures import BLUE, add_legend, new_panels, write_figure
from dpbench.harness.reports.run_rows import RunRow
from dpbench.harness.reports.run_table import EPSILON, RunTable
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.readers import read_metrics
from dpbench.harness.runs.record import MEASURED

Axis = Literal["step", "epsilon"]
BOUND = "privacy/bound/"
_X_LABELS = {"step": "step", "epsilon": "ε spent (RDP)"}
_COMPARED = ("nonprivate/train_loss", "nonprivate/discriminator_loss", "gan/generator_loss", EPSILON)
_STYLES = ("-", "--", ":", "-.")  # of each ten curves
_LOGARITHMIC = ("bound", "norm", "noise / signal")  # which may begin orders of magnitude from where they end
_MOST_POINTS = 400  # of a curve
_DIAGNOSTICS = {
    "nonprivate/grad_norm/": "mean l2 norm of a record's gradient",
    "nonprivate/bound/": "clipping bound",
    "nonprivate/clip_fraction/": "share of clipped records",
    "nonprivate/noise_to_signal/": "noise / signal of the sum",
}
Curve = tuple[str, int, pd.DataFrame]
"""Label; number, which gives color and dashes; values and their standard deviations (value, band), by step or ε."""


# Curves of one run, or of several


def curve_names(rows: Sequence[RunRow], prefix: str = "") -> list[str]:
    """Names of the curves that are drawn: metrics, losses, ε; or those with a prefix.

    Args:
        rows: The runs.
        prefix: Beginning of the names.
    """
    logged: dict[str, None] = {}
    for row in rows:
        logged.update(dict.fromkeys(map(str, row.curves.columns[row.curves.notna().any()])))
    if prefix:
        return [name for name in logged if name.startswith(prefix)]
    names = []
    for part in MEASURED:
        names += sorted(name for name in logged if name.startswith(part))
    return names + [name for name in _COMPARED if name in logged]


def curves_figure(table: RunTable, names: Sequence[str], axis: Axis = "step") -> Figure | None:
    """Draw the curves of runs; None where no run has any.

    Of one run, curves of one kind share a panel, such as accuracies on validation and test data. Of several runs each
    curve has a panel, in which each run has its color; of means a band shows one standard deviation.

    Args:
        table: The runs.
        names: Names of the curves.
        axis: Horizontal axis: steps, or the ε that the runs had spent.
    """
    rows = table.rows
    is_single = len(rows) == 1
    labels = table.labels()
    panels: dict[str, list[Curve]] = {}
    for name in names:
        for number, row in enumerate(rows):
            curve = _curve(row, name, axis)
            if curve.empty:
                continue
            panel = panels.setdefault(_kind(name) if is_single else _title(name), [])
            label, look = (_title(name), len(panel)) if is_single else (labels[number], number)
            panel.append((label, look, curve))
    if not panels:
        return None
    figure = panels_figure(panels, _X_LABELS[axis])
    for axes, (title, curves) in zip(figure.axes, panels.items(), strict=True):
        if "accuracy" in title:
            axes.yaxis.set_major_formatter(PercentFormatter(1))
        elif title == _title(EPSILON):
            axes.set_ylim(bottom=0)
        elif any(word in title for word in _LOGARITHMIC):
            axes.set_yscale("log")
        if is_single and len(curves) > 1:
            axes.legend(fontsize=7, frameon=False)
    if not is_single:
        add_legend(figure)
    return figure


def _kind(name: str) -> str:
    """Title of the panel in which a curve of a single run is drawn."""
    if name.startswith(BOUND):
        return "clipping bound"
    for prefix, measured in _DIAGNOSTICS.items():
        if name.startswith(prefix):
            return measured
    return name.partition("/")[2] if name.startswith(MEASURED) else _title(name)


def _title(name: str) -> str:
    """Name of a curve for people."""
    if name == EPSILON:
        return _X_LABELS["epsilon"]
    if name.startswith("nonprivate/"):
        return f"{name} (not private)"
    return name.removeprefix("privacy/")


def panels_figure(panels: Mapping[str, Sequence[Curve]], x_label: str, width: float = 5.0, **shared: Any) -> Figure:
    """Draw curves with their bands, two panels in a row.

    Args:
        panels: Title → curves, at least one panel.
        x_label: Label of the horizontal axes.
        width: Width of a panel in inches.
        shared: `sharex` and `sharey` of the panels.
    """
    figure, places = new_panels(len(panels), 2, width, 0.6 * width, **shared)
    for axes, (title, curves) in zip(places, panels.items(), strict=True):
        for label, number, curve in curves:
            color = f"C{number % 10}"
            style = _STYLES[number // 10 % len(_STYLES)]
            marker = "o" if len(curve) == 1 else None
            values = curve["value"]
            axes.plot(curve.index, values, color=color, linestyle=style, marker=marker, label=label)
            if curve["band"].notna().any():
                low = values - curve["band"]
                high = values + curve["band"]
                axes.fill_between(curve.index, low, high, color=color, alpha=0.2, linewidth=0)
        # From the beginning: runs that measured once, or spent the same ε, would else fill the width with nothing.
        axes.set(xlabel=x_label, xlim=(0, None))
        axes.set_title(title, fontsize=9)
    return figure


def _curve(row: RunRow, name: str, axis: Axis) -> pd.DataFrame:
    """Values of a run's curve and their standard deviations, by step or ε, means of neighbors where they are many."""
    if name not in row.curves:
        return pd.DataFrame()
    curve = pd.DataFrame({"value": row.curves[name], "band": row.bands.get(name, np.nan)})
    curve = curve.dropna(subset="value")
    if axis == "epsilon":
        spent = row.curves.get(EPSILON, pd.Series(dtype=float)).dropna()
        if name == EPSILON or spent.empty:
            return pd.DataFrame()
        curve = curve.loc[spent.index.min() : spent.index.max()]
        curve = curve.set_axis(np.interp(curve.index, spent.index, spent))
    size = -(-len(curve) // _MOST_POINTS)
    return curve if size < 2 else curve.rolling(size).mean().iloc[size - 1 :: size]


def draw_comparison(table: RunTable, path: Path, axis: Axis = "step") -> Path | None:
    """Draw all curves of runs; None where no run has any.

    Args:
        table: The runs.
        path: The picture.
        axis: Horizontal axis, see `curves_figure`.
    """
    figure = curves_figure(table, curve_names(table.rows), axis)
    return None if figure is None else write_figure(path, figure)


def plot_curves(folder: RunFolder, title: str) -> Path | None:
    """Draw a run's learning curves, its ε and its clipping bounds; nothing that was computed without noise.

    Args:
        folder: The run, with its metrics.
        title: Title of the figure.

    Returns:
        The picture's path, or None if nothing of that kind was logged.
    """
    return _plot_run(folder, ("", BOUND), title, folder.curves)


def plot_diagnostics(folder: RunFolder, title: str) -> Path | None:
    """Draw the logs of `GradientDiagnostics` (three_tools_2018, Fig. 3), computed on records without noise.

    Args:
        folder: The run, with its metrics.
        title: Title of the figure.

    Returns:
        The picture's path, or None if nothing of that kind was logged.
    """
    return _plot_run(folder, tuple(_DIAGNOSTICS), f"{title}: not private", folder.diagnostics)


def _plot_run(folder: RunFolder, prefixes: Sequence[str], title: str, path: Path) -> Path | None:
    row = RunRow(name=title, settings={}, metrics={}, curves=read_metrics(folder.metrics))
    names = [name for prefix in prefixes for name in curve_names([row], prefix)]
    if "" in prefixes:
        names = [name for name in names if not name.startswith("nonprivate/")]
    figure = curves_figure(RunTable((row,)), names)
    if figure is None:
        return None
    figure.suptitle(title)
    return write_figure(path, figure)


def draw_histogram(axes: Axes, counts: pd.DataFrame) -> float:
    """Draw how large the values of gradients are; returns the percentage that is zero or too small to be drawn.

    Args:
        axes: Target axes.
        counts: Columns log10_from, log10_to and count.
    """
    share = counts["count"] / max(counts["count"].sum(), 1)
    bounded = np.isfinite(counts["log10_from"]) & np.isfinite(counts["log10_to"])
    left = counts["log10_from"][bounded]
    axes.bar(left, share[bounded], width=counts["log10_to"][bounded] - left, align="edge", color=BLUE)
    return float(100 * share[~np.isfinite(counts["log10_from"])].sum())
