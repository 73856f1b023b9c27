"""Figures of what was measured: times relative to the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.methods import MALLOC, PURE, REFERENCE, TRITON
from benchmarks.rows import Row
from benchmarks.workloads import FOUR
from dpbench.harness.reports.figures import new_figure, write_figure

LABELS = {  # methods in the figure of `make bench`
    REFERENCE: "plain PyTorch",
    "harness/no privacy": "whole harness, no privacy",
    "ours/flat": "engine, flat clipping",
    "ours/adaptive_quantile": "engine, adaptive clipping",
    "ours/discretized": "engine, discretized",
    f"ours/flat {TRITON}": "engine, flat clipping, Triton",
    f"ours/discretized {TRITON}": "engine, discretized, Triton",
    f"ours/flat {PURE}": "engine, flat clipping, no compiler",
    f"ours/discretized {PURE}": "engine, discretized, no compiler",
    "harness/flat": "whole harness, flat clipping",
    "harness/flat graph": "whole harness, executor=graph",
    f"opacus/hooks {MALLOC}": "Opacus, hooks",
    f"opacus/functorch {MALLOC}": "Opacus, functorch",
    f"opacus/ghost {MALLOC}": "Opacus, ghost",
    "jax/vmap": "JAX, vmap",
    "jax/jax_privacy": "JAX Privacy",
}
_PICTURED = (*FOUR, "lstm b128", "attention b128")
_FAMILIES = {  # colors that people who see no red or green can tell apart (Okabe and Ito)
    "plain": ("#999999", "PyTorch without privacy"),
    "ours": ("#0072b2", "dpbench: the engine alone"),
    "harness": ("#56b4e9", "dpbench: the whole harness"),
    "opacus": ("#d55e00", "Opacus"),
    "jax": ("#e69f00", "JAX"),
}
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000)
_BAR_INCHES = 0.27
_TITLE_INCHES = 0.55
_LEGEND_INCHES = 1.1  # with the axis below


def is_pictured(row: Row) -> bool:
    """Whether the figure of `make bench` has a bar for a row."""
    return row["workload"] in _PICTURED and row["method"] in LABELS and bool(row["ratio_to_limit"])


def draw_ratios(rows: Sequence[Row], path: Path) -> None:
    """Draw bars of wall time relative to the limit, a panel for each workload, all on one logarithmic axis.

    Args:
        rows: With ratios.
        path: Of the figure; none is written where nothing was measured.
    """
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if is_pictured(row):
            panels.setdefault(row["workload"], []).append(row)
    if not panels:
        return
    heights = [_BAR_INCHES * len(panel) + _TITLE_INCHES for panel in panels.values()]
    figure = new_figure(10, sum(heights) + _LEGEND_INCHES)
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    axes = None
    for number, (title, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[number], sharex=axes)
        _draw_panel(axes, title, panel)
    drawn = [row for panel in panels.values() for row in panel]
    _set_scale(axes, [row["ratio_to_limit"] for row in drawn])
    families = dict.fromkeys(_family(row["method"]) for row in drawn)
    handles = [Patch(color=color, label=label) for color, label in _FAMILIES.values() if (color, label) in families]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    write_figure(path, figure)


def _family(method: str) -> tuple[str, str]:
    return _FAMILIES[method.partition("/")[0]]


def _draw_panel(axes: Any, title: str, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: float(row["ratio_to_limit"]), reverse=True)
    ratios = [row["ratio_to_limit"] for row in rows]
    axes.barh(range(len(rows)), ratios, color=[_family(row["method"])[0] for row in rows])
    axes.set_yticks(range(len(rows)), [LABELS[row["method"]] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axvline(1, color="black", linewidth=0.8)
    # White behind each number: the line of the limit must not cross it.
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for place, ratio in enumerate(ratios):
        axes.annotate(
            f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
            (ratio, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox=background,
        )
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _set_scale(axes: Any, ratios: Sequence[float]) -> None:
    """The shared axis, with room for the numbers behind the bars."""
    low = min(0.5, 0.7 * min(ratios))
    high = max(ratios) * 1.6
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.set_xlabel("time of a step, in multiples of the fastest step without privacy (logarithmic)")
