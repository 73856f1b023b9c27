"""ROC curves on logarithmic axes: what was measured, what an audit proves, and what a ledger allows at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dpbench.reports.figures import PAGE_PANEL, Picture, new_figure, page_picture

Floats = NDArray[np.float64]
LEAST_RATE = 1e-4
"""False positive rate at which axes begin."""
RATES: Floats = np.geomspace(LEAST_RATE, 1, 61)
"""False positive rates at which curves are drawn: fifteen a decade."""
_MEASURED = ("#3060a8", "#508850", "#a070b0", "#c09020")
_BOUND = "#c04030"
_GRAY = "#808080"
_COLUMNS = 3
_DASHES = ("-", "--", ":")


@dataclass(frozen=True)
class RocStyle:
    """How a curve is drawn, here and in the legend of a page.

    Attributes:
        color: As the drawing has it.
        page_color: Number of the same color on a page (--s0, ...).
        dashes: 0 for a solid line, 1 for a dashed one, 2 for a dotted one.
        width: In points.
        alpha: Opacity.
    """

    color: str
    page_color: int
    dashes: int = 0
    width: float = 1.6
    alpha: float = 1.0


ALLOWED = RocStyle(_BOUND, page_color=1)
AUDITED = RocStyle(_BOUND, page_color=1, dashes=1, width=1.2)
_GUESSING = RocStyle(_GRAY, page_color=7, dashes=2, width=0.9)


def measured(place: int, faint: bool = False) -> RocStyle:
    """Style of a measured curve.

    Args:
        place: Number of its kind, such as of what the attacker sees: each kind has a color.
        faint: Whether it is one of several, beside one that matters more.
    """
    color = place % len(_MEASURED)
    # On pages the color of bounds is number 1, between those of the first and the second kind of curve.
    page_color = color + 1 if color else 0
    if faint:
        return RocStyle(_MEASURED[color], page_color, width=0.7, alpha=0.5)
    return RocStyle(_MEASURED[color], page_color)


@dataclass(frozen=True, eq=False)
class RocCurve:
    """True positive rates by false positive rates.

    Attributes:
        label: What it is, in a legend.
        style: How it is drawn.
        fpr: (points,) increasing.
        tpr: (points,).
    """

    label: str
    style: RocStyle
    fpr: Floats
    tpr: Floats


@dataclass(frozen=True)
class OperatingPoint:
    """Both rates of one threshold, with the limits of what they are in truth.

    Attributes:
        label: What it is, in a legend.
        fpr: False positive rate.
        tpr: True positive rate.
        most_fpr: Upper limit of the first.
        least_tpr: Lower limit of the second.
    """

    label: str
    fpr: float
    tpr: float
    most_fpr: float
    least_tpr: float


@dataclass(frozen=True)
class RocPanel:
    """What stands on the same axes.

    Attributes:
        title: Above it.
        curves: The later ones lie above the earlier ones.
        points: Of single thresholds.
    """

    title: str
    curves: tuple[RocCurve, ...]
    points: tuple[OperatingPoint, ...] = ()


def draw_roc(axes: Axes, panel: RocPanel, least_rate: float = LEAST_RATE) -> None:
    """Draw curves and points on logarithmic axes, above those of a guess.

    Args:
        axes: Where to.
        panel: What.
        least_rate: At which the axes begin; what lies below is drawn there.
    """
    for curve in panel.curves:
        _draw_curve(axes, curve, least_rate)
    ends = np.array([least_rate, 1.0])
    _draw_curve(axes, RocCurve("guessing", _GUESSING, ends, ends), least_rate)
    for point in panel.points:
        fpr = max(point.fpr, least_rate)
        tpr = max(point.tpr, least_rate)
        # Only the limits that count for a lower bound: at most so many errors, at least so many members.
        axes.errorbar(
            fpr,
            tpr,
            xerr=[[0.0], [max(point.most_fpr - fpr, 0.0)]],
            yerr=[[max(tpr - max(point.least_tpr, least_rate), 0.0)], [0.0]],
            fmt="o",
            color=_MEASURED[0],
            markersize=5,
            capsize=3,
            linewidth=1,
            label=point.label,
        )
    axes.set(xscale="log", yscale="log", xlim=(least_rate, 1), ylim=(least_rate, 1.1))
    axes.set_xlabel("others called members (FPR)")
    axes.set_ylabel("members called members (TPR)")
    axes.set_title(panel.title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curve(axes: Axes, curve: RocCurve, least_rate: float) -> None:
    style = curve.style
    # From the last point at or below the least rate on: those before it would be a line along the axis.
    first = max(int(np.searchsorted(curve.fpr, least_rate, side="right")) - 1, 0)
    axes.plot(
        np.maximum(curve.fpr[first:], least_rate),
        np.maximum(curve.tpr[first:], least_rate),
        color=style.color,
        linestyle=_DASHES[style.dashes],
        linewidth=style.width,
        alpha=style.alpha,
        label=curve.label,
    )


def roc_figure(panels: Sequence[RocPanel]) -> Figure:
    """Panels side by side, with one legend below them.

    Args:
        panels: At least one.
    """
    columns = min(len(panels), _COLUMNS)
    lines = -(-len(panels) // columns)
    figure = new_figure(max(3.6 * columns, 6), 3.5 * lines + 0.5)
    axes_of_panels = np.ravel(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True))
    handles: dict[str, Artist] = {}
    for axes, panel in zip(axes_of_panels, panels, strict=False):
        draw_roc(axes, panel)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    for axes in axes_of_panels[len(panels) :]:
        axes.set_visible(False)
    style: dict[str, Any] = {"loc": "outside lower center", "ncols": columns + 1, "frameon": False, "fontsize": 8}
    figure.legend(list(handles.values()), list(handles), **style)
    return figure


def page_pictures(panels: Sequence[RocPanel], name: str) -> list[Picture]:
    """A picture of each panel for a page, whose columns are as wide as a phone.

    Args:
        panels: What is drawn.
        name: Of the pictures on the page, see `figures.svg`.
    """
    pictures = []
    for number, panel in enumerate(panels):
        figure = new_figure(*PAGE_PANEL)
        draw_roc(figure.subplots(), RocPanel("", panel.curves, panel.points))
        pictures.append(page_picture(panel.title, figure, f"{name}{number}"))
    return pictures


def page_legend(panels: Sequence[RocPanel]) -> list[tuple[int, int, str]]:
    """Color, dashes and name of each line of some panels, once each: the legend of `page_pictures`."""
    styles: dict[str, RocStyle] = {}
    for panel in panels:
        for curve in panel.curves:
            styles.setdefault(curve.label, curve.style)
    styles["guessing"] = _GUESSING
    return [(style.page_color, style.dashes, label) for label, style in styles.items()]
