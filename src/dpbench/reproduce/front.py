"""The overview at a glance, for the README: images by example, a color for each paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce.overview import FIELD, MARKERS, OURS, PAPER

FRONT = "overview_images.png"
_DATA = ("mnist", "cifar10")
_PAPERS = {
    "three_tools": ("van der Veen et al. 2018", "C0"),
    "pyvacy": ("Waites 2019", "C2"),
    "gradient_compression": ("Nasr et al. 2020", "C1"),
    "adaptive_quantile": ("Andrew et al. 2021", "C3"),
    "recipes": ("our own recipes", "C4"),
}
_BLACK, _GRAY = "#333333", "#888888"
_SHOWN = 0.9  # of the figures of a panel; the lowest are said, and not drawn


def write_front(frame: pd.DataFrame, folder: Path) -> None:
    """Write the picture beside the overview.

    Args:
        frame: See `overview.points`.
        folder: Of the results.
    """
    panels = [(name, frame[(frame["data"] == name) & (frame["unit"] != "user")]) for name in _DATA]
    panels = [(name, own) for name, own in panels if len(own)]
    if not panels:
        return
    figure = new_figure(11.0, 4.6)
    for axes, (_, own) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, own)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    write_figure(folder / FRONT, figure)


def _draw(axes: Axes, panel: pd.DataFrame) -> None:
    lowest = float(panel["value"].quantile(1 - _SHOWN))
    top = float(panel["value"].max())
    room = 0.06 * (top - lowest)
    shown = panel[panel["value"] >= lowest - room]
    for (table, whose, unit), own in shown.groupby(["table", "whose", "unit"], sort=False):
        color = next(
            (color for name, (_, color) in _PAPERS.items() if str(table).startswith(name)),
            _GRAY if whose == FIELD else _BLACK,
        )
        style: dict[str, Any] = {"marker": MARKERS[str(whose), str(unit)], "color": color, "linestyle": "none"}
        style["markersize"] = 9 if whose == FIELD else 5
        style["markerfacecolor"] = "none" if unit == "microbatch" else color
        axes.plot(own["epsilon"], own["value"], alpha=0.85, zorder=2 if whose == FIELD else 3, **style)
        half = own["half"].astype(float)
        half = half.where(half < top - lowest)  # three runs of which one failed: an interval as high as the picture
        axes.errorbar(own["epsilon"], own["value"], yerr=half, fmt="none", ecolor=color, elinewidth=1, alpha=0.6)
    axes.set_ylim(lowest - room, top + room)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    below = len(panel) - len(shown)
    axes.set_title(panel["title"].iloc[0] + (f" ({below} lower figures are not shown)" if below else ""), fontsize=10)
    axes.set_xlabel("ε for one example; ours: RDP accountant; others': as claimed", fontsize=9)
    axes.set_ylabel(panel["axis"].iloc[0])
    axes.grid(alpha=0.3)


def _legend() -> list[Line2D]:
    papers = [Line2D([], [], color=color, linewidth=5, label=name) for name, color in _PAPERS.values()]
    marks = [
        (OURS, "example", "ours; 95 % intervals of three runs or more"),
        (PAPER, "example", "papers'"),
        (PAPER, "microbatch", "papers', ε for a microbatch"),
        (FIELD, "example", "others', no extra data"),
    ]
    handles = []
    for whose, unit, label in marks:
        color = _GRAY if whose == FIELD else _BLACK
        style: dict[str, Any] = {"marker": MARKERS[whose, unit], "markersize": 9 if whose == FIELD else 5}
        style["markerfacecolor"] = "none" if unit == "microbatch" else color
        handles.append(Line2D([], [], color=color, linestyle="none", label=label, **style))
    return papers + handles
