"""Drawings of a page: those of the other reports, in the colors of the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from dpbench.reports.compare import X_LABELS, Axis, curve_names, draw_panel, has_epsilon
from dpbench.reports.compared import EPSILON, ComparedRun
from dpbench.reports.figures import new_figure, svg
from dpbench.reports.page.blocks import Image, Picture, Pictures

BOUND = "privacy/bound/"
_TITLES = {BOUND: "clipping bound", EPSILON: "ε spent (RDP)"}
_MOST_POINTS = 400  # of a curve
_MOST_PANELS = 12  # of bounds
_PANEL = (4.4, 2.7)  # inches: a column of the page, and the width of a phone
_TAB10 = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
_HOUSE = ("#3060a8", "#c04030", "#508850", "#a070b0", "#c09020")
COLORS = {
    "#000000": "var(--ink)",
    "#ffffff": "var(--card)",
    "#b0b0b0": "var(--grid)",
    "#cccccc": "var(--grid)",
    "#808080": "var(--soft)",
    **{drawn: f"var(--s{number})" for number, drawn in enumerate(_TAB10)},
    **{drawn: f"var(--s{number})" for number, drawn in enumerate(_HOUSE)},
}
"""Colors of our drawings → those of the page, which are others in the dark."""


def curves(runs: Sequence[ComparedRun], names: Sequence[str]) -> Pictures | None:
    """A panel for each curve, all runs in it; None where nothing was logged."""
    several = [
        name for name in curve_names(runs) if any(name in run.curves and run.curves[name].count() > 1 for run in runs)
    ]
    shown = [_picture(f"curve{place}", runs, name) for place, name in enumerate(several)]
    return Pictures(shown, _legend(runs, names)) if shown else None


def bounds(runs: Sequence[ComparedRun], names: Sequence[str]) -> tuple[Pictures | None, int]:
    """Clipping bounds: of one run all groups in a panel, of several runs a panel for each group.

    Returns:
        The drawing, if bounds were logged, and how many groups are not in it.
    """
    groups = list(dict.fromkeys(str(name) for run in runs for name in run.curves if str(name).startswith(BOUND)))
    if not groups:
        return None, 0
    if len(runs) > 1:
        shown = [_picture(f"bound{place}", runs, name) for place, name in enumerate(groups[:_MOST_PANELS])]
        return Pictures(shown, _legend(runs, names)), len(groups) - len(shown)
    run = runs[0]
    kept = [name for name in run.curves if not str(name).startswith(BOUND)]
    each = [replace(run, curves=run.curves[[*kept, name]].rename(columns={name: BOUND})) for name in groups]
    own = [name.removeprefix(BOUND) for name in groups]
    return Pictures([_picture("bounds", each, BOUND)], _legend(each, own)), 0


def drawing(title: str, figure: Figure, name: str, note: str = "") -> Pictures:
    """One that another report makes."""
    return Pictures([Picture(title, svg(figure, name, COLORS), note=note)], wide=True)


def image(path: Path, words: str) -> Image:
    """A PNG, in the page itself."""
    return Image(f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}", words)


def _picture(place: str, runs: Sequence[ComparedRun], name: str) -> Picture:
    others = _panel(runs, name, "epsilon", f"{place}e") if has_epsilon(runs, name) else ""
    title = _TITLES.get(name, name.removeprefix("privacy/"))
    note = "not private" if name.startswith("nonprivate/") else ""
    return Picture(title, _panel(runs, name, "step", f"{place}s"), others, note)


def _panel(runs: Sequence[ComparedRun], name: str, axis: Axis, place: str) -> str:
    figure = new_figure(*_PANEL)
    axes = figure.subplots()
    draw_panel(axes, runs, name, axis, [""] * len(runs), _MOST_POINTS)
    axes.set_xlabel(X_LABELS[axis])
    axes.spines[["top", "right"]].set_visible(False)
    if name.startswith(BOUND):
        axes.set_yscale("log")
    return svg(figure, place, COLORS)


def _legend(runs: Sequence[ComparedRun], names: Sequence[str]) -> list[tuple[int, int, str]]:
    if len(runs) == 1:
        return []
    return [(number % 10, number // 10 % 4, name) for number, name in enumerate(names)]
