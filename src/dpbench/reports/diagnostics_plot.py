"""nonprivate_diagnostics.png: gradient norms, bounds, clipped share, noise, gradient values of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpbench.reports.figures import new_figure, write_figure
from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import read_csv, read_metrics


def plot_diagnostics(folder: RunFolder, title: str) -> Path | None:
    """Draw what `GradientDiagnostics` logged (three_tools_2018, Fig. 3; gradient_compression_denoising_2020, Fig. 1).

    Args:
        folder: Of the run, with its metrics and the histogram.
        title: Above the figure.

    Returns:
        The picture's path, or None if there is nothing to draw.
    """
    table = read_metrics(folder.metrics)
    norms = _columns(table, "nonprivate/grad_norm/")
    if norms.empty:
        return None
    clipped, noise = _columns(table, "nonprivate/clip_fraction/"), _columns(table, "nonprivate/noise_to_signal/")
    panels = [("mean l2 norm of a record's gradient", norms, True)]
    panels += [("clipping bound", _columns(table, "nonprivate/bound/"), True)]
    panels += [("share of clipped records", clipped, False), ("noise / signal of the sum", noise, True)]
    panels = [panel for panel in panels if not panel[1].empty]
    rows = (len(panels) + 2) // 2
    figure = new_figure(13, 3.6 * rows)
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for ax, (label, values, log) in zip(axes, panels, strict=False):
        _lines(ax, values, label, log)
    _histogram(axes[len(panels)], folder.gradient_histogram)
    for ax in axes[len(panels) + 1 :]:
        ax.set_visible(False)
    figure.suptitle(f"{title}: not private")
    return write_figure(folder.diagnostics, figure)


def _columns(table: pd.DataFrame, prefix: str) -> pd.DataFrame:
    chosen = [str(column) for column in table if str(column).startswith(prefix)]
    return table[chosen].rename(columns=lambda name: name.removeprefix(prefix)).dropna(how="all")


def _lines(ax: Axes, table: pd.DataFrame, label: str, log: bool) -> None:
    marker = "." if len(table) < 5 else None
    for name, values in table.items():
        style = "--" if str(name).endswith("bias") else "-"
        ax.plot(values.index, values, linestyle=style, marker=marker, label=str(name), linewidth=1.2)
    if log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _histogram(ax: Axes, source: Path) -> None:
    ax.set_xlabel("log10 |gradient value|")
    ax.set_ylabel("share of values")
    if not source.exists():
        return
    table = read_csv(source, ["log10_from", "log10_to", "count"])
    total = max(table["count"].sum(), 1)
    inner = table[np.isfinite(table["log10_from"]) & np.isfinite(table["log10_to"])]
    width = inner["log10_to"] - inner["log10_from"]
    ax.bar(inner["log10_from"], inner["count"] / total, width=width, align="edge", color="#3060a8")
    ax.set_title(f"{100 * table['count'].iloc[0] / total:.0f} % are zero or below 1e-9", fontsize=9)
    ax.grid(alpha=0.3)
