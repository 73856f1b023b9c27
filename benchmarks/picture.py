"""The picture of a file of rows: time of a step relative to the limit, on one axis for all workloads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.methods import MALLOC
from benchmarks.rows import Row
from dpbench.reports.figures import new_figure, write_figure

_FAMILIES = {  # colors that people who see no red or green can tell apart (Okabe and Ito)
    "plain": ("#999999", "PyTorch without privacy"),
    "ours": ("#0072b2", "dpbench: the engine alone"),
    "harness": ("#56b4e9", "dpbench: the whole harness"),
    "opacus": ("#d55e00", "Opacus"),
    "jax": ("#e69f00", "JAX"),
}
_OTHER = ("#cc79a7", "other ways")
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000)
_BAR, _TITLE, _REST = 0.27, 0.55, 1.1  # inches: of a bar, of a panel's title, of legend and axis


def draw(rows: list[Row], path: Path, labels: Mapping[str, str] | None = None) -> None:
    """Bars of wall time relative to the limit, a panel for each workload, all on one logarithmic axis.

    Args:
        rows: With ratios.
        path: Of the picture; none is written where nothing was measured.
        labels: Methods to show and how to call them; None shows all, the peers' second measurements aside.
    """
    shown = [row for row in rows if row["ratio_to_limit"] and _chosen(row["method"], labels)]
    panels = {name: [row for row in shown if row["workload"] == name] for name in dict.fromkeys(_workloads(shown))}
    if not panels:
        return
    heights = [_BAR * len(own) + _TITLE for own in panels.values()]
    figure = new_figure(10, sum(heights) + _REST)
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    first = None
    for number, (name, own) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[number], sharex=first)
        first = first or axes
        _panel(axes, name, own, labels or {})
    _scale(first, [row["ratio_to_limit"] for row in shown])
    axes.set_xlabel("time of a step, in multiples of the fastest step without privacy (logarithmic)")
    families = list(dict.fromkeys(_family(row["method"]) for row in shown))
    order = [family for family in (*_FAMILIES.values(), _OTHER) if family in families]
    handles = [Patch(color=color, label=label) for color, label in order]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    write_figure(path, figure)


def _workloads(rows: list[Row]) -> list[str]:
    return [row["workload"] for row in rows]


def _chosen(method: str, labels: Mapping[str, str] | None) -> bool:
    return method in labels if labels is not None else MALLOC not in method or "opacus" in method


def _family(method: str) -> tuple[str, str]:
    return _FAMILIES.get(method.partition("/")[0], _OTHER)


def _panel(axes: Any, title: str, rows: list[Row], labels: Mapping[str, str]) -> None:
    rows = sorted(rows, key=lambda row: float(row["ratio_to_limit"]), reverse=True)
    ratios = [row["ratio_to_limit"] for row in rows]
    axes.barh(range(len(rows)), ratios, color=[_family(row["method"])[0] for row in rows])
    axes.set_yticks(range(len(rows)), [labels.get(row["method"], row["method"]) for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axvline(1, color="black", linewidth=0.8)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # the line must not cross the number
    for at, ratio in enumerate(ratios):
        number = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
        axes.annotate(number, (ratio, at), (4, 0), textcoords="offset points", va="center", fontsize=9, bbox=behind)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axes: Any, ratios: list[float]) -> None:
    """The shared axis, with room for the numbers behind the bars."""
    low, high = min(0.5, 0.7 * min(ratios)), max(ratios) * 1.6
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
