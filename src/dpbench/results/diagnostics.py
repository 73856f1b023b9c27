"""diagnostics.png: gradient norms, bounds, clipped share, noise and gradient values of a run. Not private."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

HISTOGRAM = "nonprivate_gradient_histogram.csv"


def plot_diagnostics(folder: Path, title: str) -> Path | None:
    """Draw what `GradientDiagnostics` logged (three_tools_2018, Fig. 3; gradient_compression_denoising_2020, Fig. 1).

    Args:
        folder: Holds metrics.csv and the histogram.
        title: Above the figure.

    Returns:
        The picture's path, or None if there is nothing to draw.
    """
    source = folder / "metrics.csv"
    table = pd.read_csv(source, index_col="step") if source.exists() else pd.DataFrame()
    norms = _columns(table, "nonprivate/grad_norm/")
    if norms.empty:
        return None
    clipped, noise = _columns(table, "nonprivate/clip_fraction/"), _columns(table, "nonprivate/noise_to_signal/")
    figure = Figure(figsize=(11, 7 if len(clipped) else 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if len(clipped) else 1, 2, squeeze=False)
    _lines(axes[0, 0], norms, "mean l2 norm of a record's gradient", log=True)
    _histogram(axes[0, 1], folder / HISTOGRAM)
    if len(clipped):
        _lines(axes[1, 0], clipped, "share of clipped records")
        axes[1, 0].set_ylim(-0.03, 1.03)
        bounds = _columns(table, "nonprivate/bound/")
        twin = axes[1, 0].twinx()
        for name, values in bounds.items():
            twin.plot(values.index, values, linestyle=":", linewidth=1.2, label=f"bound {name}")
        twin.set_yscale("log")
        twin.set_ylabel("bound (dotted)")
        _lines(axes[1, 1], noise, "noise / signal of the sum", log=True)
    figure.suptitle(f"{title}: not private")
    path, temporary = folder / "nonprivate_diagnostics.png", folder / ".diagnostics.png"
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    return path


def _columns(table: pd.DataFrame, prefix: str) -> pd.DataFrame:
    chosen = [str(column) for column in table if str(column).startswith(prefix)]
    return table[chosen].rename(columns=lambda name: name.removeprefix(prefix).removeprefix("model.")).dropna(how="all")


def _lines(ax: Axes, table: pd.DataFrame, label: str, log: bool = False) -> None:
    for name, values in table.items():
        ax.plot(
            values.index, values, linestyle="--" if str(name).endswith("bias") else "-", label=str(name), linewidth=1.2
        )
    if log:
        ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=7, ncols=2)


def _histogram(ax: Axes, source: Path) -> None:
    ax.set_xlabel("log10 |gradient value|")
    ax.set_ylabel("share of values")
    if not source.exists():
        return
    table = pd.read_csv(source)
    total = max(table["count"].sum(), 1)
    inner = table[np.isfinite(table["log10_from"]) & np.isfinite(table["log10_to"])]
    width = inner["log10_to"] - inner["log10_from"]
    ax.bar(inner["log10_from"], inner["count"] / total, width=width, align="edge", color="#3060a8")
    ax.set_title(f"{100 * table['count'].iloc[0] / total:.0f} % are zero or below 1e-9", fontsize=9)
    ax.grid(alpha=0.3)
