"""curves.png: accuracy (of a GAN: losses) and epsilon against steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from dpbench.reports.figures import new_figure, write_figure
from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import read_metrics

_BOUND = "privacy/bound/"
_LOSSES = {"nonprivate/discriminator_loss": "discriminator (not private)", "gan/generator_loss": "generator"}
_BLUE, _RED, _GRAY = "#3060a8", "#c04030", "#808080"
_ACCURACIES = {"val/accuracy": ("validation", _BLUE), "test/accuracy": ("test", _GRAY)}


def plot_curves(folder: RunFolder, title: str) -> Path | None:
    """Draw a run's learning curve above its privacy budget.

    Args:
        folder: Of the run, with its metrics.
        title: Above the figure.

    Returns:
        The picture's path, or None if nothing was logged.
    """
    if not folder.metrics.exists():
        return None
    table = read_metrics(folder.metrics)
    private = "privacy/epsilon" in table
    bounds = [str(column) for column in table if str(column).startswith(_BOUND)]
    rows = 1 + private + bool(bounds)
    figure = new_figure(7, 1.6 + 1.8 * rows)
    axes = figure.subplots(rows, sharex=True, squeeze=False)[:, 0]
    accuracy = _draw_accuracy if _ACCURACIES.keys() & set(table) else _draw_other
    (_draw_losses if _LOSSES.keys() & set(table) else accuracy)(axes[0], table)
    if private:
        epsilon = table["privacy/epsilon"].dropna()
        axes[1].plot(epsilon.index, epsilon, color=_RED, marker="." if len(epsilon) < 5 else None)
        axes[1].set_ylabel("ε spent (RDP)")
        axes[1].set_ylim(bottom=0)
        _mark_last(axes[1], epsilon, ".3g")
    if bounds:
        _draw_bounds(axes[-1], table[bounds])
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.08)
    axes[-1].set_xlabel("step")
    figure.suptitle(title)
    return write_figure(folder.curves, figure)


def show_private_records(folder: RunFolder) -> bool:
    """Whether the picture holds a curve that no epsilon covers."""
    table = read_metrics(folder.metrics)
    return any(name in table for name in _LOSSES if name.startswith("nonprivate/"))


def _mark_last(ax: Axes, values: pd.Series[float], form: str) -> None:
    last = (float(values.index[-1]), float(values.iloc[-1]))
    ax.annotate(format(last[1], form), last, xytext=(4, 0), textcoords="offset points", va="center")


def _draw_bounds(ax: Axes, table: pd.DataFrame) -> None:
    for column, values in table.items():
        bound = values.dropna()
        marker = "." if len(bound) < 5 else None
        ax.plot(bound.index, bound, label=str(column).removeprefix(_BOUND), linewidth=1.2, marker=marker)
    ax.set_yscale("log")
    ax.set_ylabel("clipping bound")
    ax.legend(frameon=False, fontsize=7, ncols=3)


def _draw_losses(ax: Axes, table: pd.DataFrame) -> None:
    for column, label in _LOSSES.items():
        if column in table:
            loss = table[column].dropna()
            ax.plot(loss.index, loss, label=label, linewidth=1.2, marker="." if len(loss) < 5 else None)
    ax.set_ylabel("loss")
    ax.legend(frameon=False)


def _draw_accuracy(ax: Axes, table: pd.DataFrame) -> None:
    for column, (label, color) in _ACCURACIES.items():
        if column not in table:
            continue
        accuracy = 100 * table[column].dropna()
        ax.plot(accuracy.index, accuracy, marker="." if len(accuracy) < 50 else None, color=color, label=label)
        _mark_last(ax, accuracy, ".1f")
    ax.set_ylabel("accuracy (%)")
    if ax.lines:
        ax.legend(frameon=False, loc="lower right")


def _draw_other(ax: Axes, table: pd.DataFrame) -> None:
    """Whatever else was measured on validation and test data."""
    for column in table:
        if str(column).startswith(("val/", "test/")):
            values = table[column].dropna()
            ax.plot(values.index, values, marker="." if len(values) < 50 else None, label=column)
            _mark_last(ax, values, ".3g")
    if ax.lines:
        ax.legend(frameon=False)
