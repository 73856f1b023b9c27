"""Pictures of runs: what they logged, alone or side by side, and what an audit saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from dpbench.reports.figures import new_figure, write_figure
from dpbench.reports.roc import draw_roc
from dpbench.reports.run_rows import RunRow
from dpbench.reports.run_table import EPSILON, RunTable
from dpbench.runs.folder import RunFolder
from dpbench.runs.numbers import audit_text, epsilon_text, limit_or_none
from dpbench.runs.readers import read_csv, read_metrics
from dpbench.runs.record import MEASURED

if TYPE_CHECKING:
    from dpbench.reports.audit import AuditReport

Axis = Literal["step", "epsilon"]
X_LABELS = {"step": "step", "epsilon": "ε spent (RDP)"}
_COMPARED = ("nonprivate/train_loss", "nonprivate/discriminator_loss", "gan/generator_loss", EPSILON)
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))  # of each ten curves: dashes, and a single point
_BOUND = "privacy/bound/"
_LOSSES = {"nonprivate/discriminator_loss": "discriminator (not private)", "gan/generator_loss": "generator"}
_BLUE = "#3060a8"
_RED = "#c04030"
_GRAY = "#808080"
_LETTER = 0.058  # inches of a legend's letter
_LINE = 0.165  # and of its line
_ACCURACIES = {"val/accuracy": ("validation", _BLUE), "test/accuracy": ("test", _GRAY)}


def _draw(ax: Axes, values: pd.Series[float], few: int = 5, **style: Any) -> None:
    """One curve; its points, too, where they are few, and a single one large enough to be seen."""
    marker = "o" if len(values) == 1 else "." if len(values) < few else None
    ax.plot(values.index, values, marker=marker, **style)


def _mark_last(ax: Axes, values: pd.Series[float], text: str) -> None:
    """Write a figure beside the end of a curve."""
    end = (float(values.index[-1]), float(values.iloc[-1]))
    ax.annotate(text, end, xytext=(4, 0), textcoords="offset points", va="center")


def _open(ax: Axes) -> None:
    """No frame above and to the right."""
    ax.spines[["top", "right"]].set_visible(False)


def _legend(ax: Axes, **style: Any) -> None:
    """A legend without a frame beside the panel, where it covers nothing; none where there is no line."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), **style)


# One run


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
    private = EPSILON in table
    bounds = [str(column) for column in table if str(column).startswith(_BOUND)]
    rows = 1 + private + bool(bounds)
    # A panel each for metrics, epsilon and bounds, which have scales of their own.
    figure = new_figure(7, 1.6 + 1.8 * rows)
    axes = figure.subplots(rows, sharex=True, squeeze=False)[:, 0]
    _draw_metrics(axes[0], table)
    if private:
        spent = table[EPSILON].dropna()
        _draw(axes[1], spent, color=_RED)
        _mark_last(axes[1], spent, epsilon_text(spent.iloc[-1]))
        axes[1].set_ylabel(X_LABELS["epsilon"])
        axes[1].set_ylim(bottom=0)
    # A margin to the right, for the figure that stands beside the last point.
    # With their frame of time, so that what was measured once stands where it was measured.
    axes[0].set_xlim(left=0, right=1.12 * max(1, table.index.max()))
    for column in bounds:
        _draw(axes[-1], table[column].dropna(), label=column.removeprefix(_BOUND), linewidth=1.2)
    if bounds:
        axes[-1].set_yscale("log")  # an adaptive bound may begin orders of magnitude from where it ends
        axes[-1].set_ylabel("clipping bound")
        _legend(axes[-1], fontsize=7)
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.margins(x=0.08)
        _open(ax)
    axes[-1].set_xlabel("step")
    figure.suptitle(title)
    return write_figure(folder.curves, figure)


def _draw_metrics(ax: Axes, table: pd.DataFrame) -> None:
    """Losses of a GAN; else accuracies; else whatever was measured on validation and test data."""
    logged = [str(name) for name in table if table[name].notna().any()]
    losses = [name for name in _LOSSES if name in logged]
    accuracies = [name for name in _ACCURACIES if name in logged]
    if losses:
        ax.set_ylabel("loss")
        for name in losses:
            _draw(ax, table[name].dropna(), label=_LOSSES[name], linewidth=1.2)
    elif accuracies:
        ax.set_ylabel("accuracy (%)")
        for name in accuracies:
            label, color = _ACCURACIES[name]
            accuracy = 100 * table[name].dropna()
            _draw(ax, accuracy, few=50, label=label, color=color)
            _mark_last(ax, accuracy, f"{accuracy.iloc[-1]:.1f}")
    else:
        for name in logged:
            if name.startswith(MEASURED):
                values = table[name].dropna()
                _draw(ax, values, few=50, label=name)
                _mark_last(ax, values, f"{values.iloc[-1]:.3g}")
    _legend(ax)


def shows_private_records(folder: RunFolder) -> bool:
    """Whether the picture of a run has a curve that no epsilon covers."""
    table = read_metrics(folder.metrics)
    return any(name in table for name in _LOSSES if name.startswith("nonprivate/"))


def plot_diagnostics(folder: RunFolder, title: str) -> Path | None:
    """Draw what `GradientDiagnostics` logged (three_tools_2018, Fig. 3; gradient_compression_denoising_2020, Fig. 1).

    Args:
        folder: Of the run, with its metrics and the histogram.
        title: Above the figure.

    Returns:
        The picture's path, or None if there is nothing to draw.
    """
    table = read_metrics(folder.metrics)
    panels = []
    for prefix, label in (
        ("nonprivate/grad_norm/", "mean l2 norm of a record's gradient"),
        ("nonprivate/bound/", "clipping bound"),
        ("nonprivate/clip_fraction/", "share of clipped records"),
        ("nonprivate/noise_to_signal/", "noise / signal of the sum"),
    ):
        values = table[[name for name in table if str(name).startswith(prefix)]].dropna(how="all")
        if not values.empty:
            values.columns = values.columns.str.removeprefix(prefix)
            panels.append((label, values))
        elif not panels:  # without norms there was no diagnosis
            return None
    rows = (len(panels) + 2) // 2
    figure = new_figure(13, 3.6 * rows)
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for ax, (label, values) in zip(axes, panels, strict=False):
        for name, series in values.items():
            style = "--" if str(name).endswith("bias") else "-"
            _draw(ax, series, linestyle=style, label=str(name), linewidth=1.2)
        if "share" in label:
            ax.set_ylim(-0.03, 1.03)
        else:
            ax.set_yscale("log")
        ax.set_xlabel("step")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
        _legend(ax, fontsize=7)
    _draw_histogram(axes[len(panels)], folder.gradient_histogram)
    for ax in axes[len(panels) + 1 :]:
        ax.set_visible(False)
    figure.suptitle(f"{title}: not private")
    return write_figure(folder.diagnostics, figure)


def _draw_histogram(ax: Axes, source: Path) -> None:
    ax.set_xlabel("log10 |gradient value|")
    ax.set_ylabel("share of values")
    if not source.exists():
        return
    table = read_csv(source, ["log10_from", "log10_to", "count"])
    total = max(table["count"].sum(), 1)
    inner = table[np.isfinite(table["log10_from"]) & np.isfinite(table["log10_to"])]
    width = inner["log10_to"] - inner["log10_from"]
    ax.bar(inner["log10_from"], inner["count"] / total, width=width, align="edge", color=_BLUE)
    ax.set_title(f"{100 * table['count'].iloc[0] / total:.0f} % are zero or below 1e-9", fontsize=9)
    ax.grid(alpha=0.3)


# Runs side by side


def curve_names(rows: Sequence[RunRow]) -> list[str]:
    """What runs logged and a comparison draws: what was measured, losses, epsilon."""
    logged: set[str] = set()
    for row in rows:
        logged.update(map(str, row.curves.columns[row.curves.notna().any()]))
    names = []
    for part in MEASURED:
        names += sorted(name for name in logged if name.startswith(part))
    return names + [name for name in _COMPARED if name in logged]


def draw_comparison(table: RunTable, path: Path, axis: Axis = "step", mark: str = "") -> Path | None:
    """Draw all curves of each kind in one panel; None where no run has any.

    Args:
        table: Of the runs.
        path: The picture.
        axis: What is drawn to the right: steps, or the epsilon that they had spent.
        mark: See `figures.free_place`.
    """
    rows = table.rows
    names = [name for name in curve_names(rows) if axis == "step" or has_epsilon(rows, name)]
    if not names:
        return None
    labels = table.labels() if len(rows) > 1 else [rows[0].name]
    # The legend stands beside the panels, where it covers no curve, and has room for all of its lines.
    longest = max(map(len, labels))
    figure = new_figure(8 + 0.4 + _LETTER * longest, max(1 + 2.4 * len(names), 0.5 + _LINE * len(labels)))
    panels = figure.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        draw_panel(axes, rows, name, axis)
        axes.set_ylabel(name)
    panels[-1].set_xlabel(X_LABELS[axis])
    lines = []
    for number, label in enumerate(labels):
        if not rows[number].curves.empty:
            lines.append(Line2D([], [], label=label, **_look(number)))
    figure.legend(handles=lines, loc="outside right upper", fontsize=7, frameon=False)
    return write_figure(path, figure, mark)


def has_epsilon(rows: Sequence[RunRow], name: str) -> bool:
    """Whether any run has a curve that can be drawn over epsilon."""
    return name != EPSILON and any(not _curve(row, name, "epsilon")[0].empty for row in rows)


def draw_panel(
    axes: Axes,
    rows: Sequence[RunRow],
    name: str,
    axis: Axis,
    most: int | None = None,
) -> None:
    """One curve of each run that has it, with a band of one standard deviation where it is a mean.

    Args:
        axes: Where to.
        rows: Which; the color of each is that of its place.
        name: Of the curve.
        axis: As in `draw`.
        most: Points of a curve; of more, means of neighbors are drawn.
    """
    for number, row in enumerate(rows):
        values, band = _curve(row, name, axis)
        if most is not None and len(values) > most:
            values = _thinned(values, most)
            band = _thinned(band, most)
        if values.empty:
            continue
        look = _look(number)
        if len(values) > 1:
            look["marker"] = "." if len(values) < 5 else None
        axes.plot(values.index, values, linewidth=1.4, **look)
        if band.notna().any():
            low = values - band
            axes.fill_between(values.index, low, values + band, color=look["color"], alpha=0.2, linewidth=0)
    if "accuracy" in name:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if name == EPSILON:
        axes.set_ylim(bottom=0)
    # From the beginning: runs that measured once, or spent the same epsilon, would else fill the width with nothing.
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)


def _look(number: int) -> dict[str, Any]:
    """Color, dashes and point of the curve of a run, by its place."""
    style, point = _STYLES[number // 10 % len(_STYLES)]
    return {"color": f"C{number % 10}", "linestyle": style, "marker": point}


def _curve(row: RunRow, name: str, axis: Axis) -> tuple[pd.Series[float], pd.Series[float]]:
    """A run's curve and its standard deviation; over epsilon where the run knows it for these steps."""
    empty = pd.Series(dtype=float)
    if name not in row.curves:
        return empty, empty
    values = row.curves[name].dropna()
    band = row.bands[name].reindex(values.index) if name in row.bands else pd.Series(np.nan, values.index)
    if axis == "step":
        return values, band
    spent = row.curves[EPSILON].dropna() if EPSILON in row.curves else empty
    if spent.empty:
        return empty, empty
    between = (values.index >= spent.index.min()) & (values.index <= spent.index.max())
    at = pd.Index(np.interp(values.index[between], spent.index, spent), name="epsilon")
    return values[between].set_axis(at), band[between].set_axis(at)


def _thinned(values: pd.Series[float], most: int) -> pd.Series[float]:
    """Means of neighbors, at most so many."""
    size = -(-len(values) // most)
    points = pd.DataFrame({"at": values.index, "value": values.to_numpy()})
    return points.groupby(points.index // size).mean().set_index("at")["value"]


# An audit


def plot_audit(path: Path, report: AuditReport[Any]) -> Path:
    """Write the picture of `audit_figure`."""
    return write_figure(path, audit_figure(report))


def audit_figure(report: AuditReport[Any]) -> Figure:
    """Draw scores of members and others, and the error rates that they give, between two bounds.

    Args:
        report: Of one run.
    """
    scores, member = report.observations
    figure = new_figure(10, 4.2)
    of_scores, of_rates = figure.subplots(1, 2)
    _draw_scores(of_scores, scores, member)
    if report.by_labels:
        of_scores.set_xlabel("score: log-odds of the label by the final weights")
        of_scores.set_ylabel("images of noise")
    else:
        of_scores.set_xlabel("score of a canary: log-likelihood ratio of what was released")
        of_scores.set_ylabel("canaries")
    draw_roc(of_rates, report.roc_panel, least_rate=_decade_below(1 / max(int((~member).sum()), 1)))
    for ax in (of_scores, of_rates):
        _legend_above(ax)
        _open(ax)
    result = report.result
    figure.suptitle(f"{result.verdict}: sound ε {audit_text(result.sound)}, audited {limit_or_none(result.audited)}")
    return figure


def _draw_scores(ax: Axes, scores: NDArray[np.float64], member: NDArray[np.bool_]) -> None:
    """Histograms of the scores of members and others."""
    low, high = np.quantile(scores, [0.002, 0.998])  # what lies beyond would leave the rest one bar
    bins = np.linspace(low, max(high, low + 1e-9), 60)
    inside = np.clip(scores, bins[0], bins[-1])
    for name, which, color in (("members", member, _BLUE), ("others", ~member, _GRAY)):
        ax.hist(inside[which], bins=bins.tolist(), color=color, alpha=0.6, label=f"{which.sum():,} {name}")


def _decade_below(rate: float) -> float:
    """The power of ten at or below a rate."""
    return float(10.0 ** np.floor(np.log10(rate)))


def _legend_above(ax: Axes) -> None:
    """A legend without a frame above the panel, where it covers nothing and takes no width."""
    ax.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
