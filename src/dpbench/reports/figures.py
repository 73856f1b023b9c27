"""Figures without a display and without global state, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpbench.files import replacing

_HEAD = 4096  # bytes
_UNDATED = {".pdf": {"CreationDate": None}}  # the same figure is the same file
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_PLACES = re.compile(r" (?:d|x|y|transform)=\"[^\"]*\"")
_DIGITS = re.compile(r"(\.\d)\d+")  # a tenth of a point is all that a screen shows
_FONT = re.compile(r"font: (?:[\w.]+ )*?([\d.]+)px [^;\"]*")
_IDS = re.compile(r"(id=\"|url\(#|href=\"#)")
_TAB10 = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
COLORS = ("#3060a8", "#c04030", "#508850", "#a070b0", "#c09020")
"""Blue, red, green, purple and yellow of our drawings."""
BLUE = COLORS[0]
RED = COLORS[1]
GRAY = "#808080"
_PAGE_COLORS = {
    "#000000": "var(--ink)",
    "#ffffff": "var(--card)",
    "#b0b0b0": "var(--grid)",
    "#cccccc": "var(--grid)",
    GRAY: "var(--soft)",
    **{drawn: f"var(--s{number})" for number, drawn in enumerate(_TAB10)},
    **{drawn: f"var(--s{number})" for number, drawn in enumerate(COLORS)},
}
"""Colors of our drawings → those of the page, which are others in the dark."""


@dataclass(frozen=True)
class Picture:
    """A drawing on a page.

    Attributes:
        title: Title above the drawing.
        svg: The drawing.
        by_epsilon: The same over ε; "" if it cannot be drawn over that.
    """

    title: str
    svg: str
    by_epsilon: str = ""


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that needs no display and no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_panels(count: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """A figure of panels in rows, each with a grid and without a frame above and to the right.

    Args:
        count: Number of panels, at least one.
        columns: Most panels in a row.
        width: Width of a panel in inches.
        height: Height of a panel in inches.
        shared: `sharex` and `sharey` of `Figure.subplots`.
    """
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = new_figure(width * columns, height * rows)
    places = figure.subplots(rows, columns, squeeze=False, **shared).flatten()
    for axes in places[count:]:
        axes.remove()
    for axes in places[:count]:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(places[:count])


def add_legend(figure: Figure) -> None:
    """Put one legend for all panels beside them, where it covers nothing, each label once."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    legend = figure.legend(list(handles.values()), list(handles), loc="outside right upper", fontsize=8, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # as in `_take_words_as_they_are`: the size is asked for here
    extent = legend.get_window_extent()
    width, height = figure.get_size_inches()
    figure.set_size_inches(
        width + extent.width / figure.dpi + 0.3,
        max(height, extent.height / figure.dpi + 0.3),
    )


def write_figure(path: Path, figure: Figure, mark: str = "") -> Path:
    """Write a picture atomically, in the format that its name ends in.

    Args:
        path: The file.
        figure: What was drawn.
        mark: See `free_place`; only a PNG has room for one.
    """
    _take_words_as_they_are(figure)
    metadata = {"Description": mark} if mark else _UNDATED.get(path.suffix)
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format=path.suffix[1:], metadata=metadata)
    return path


def mark_of(sources: Sequence[object]) -> str:
    """A mark that pages and pictures of the same sources share."""
    places = [str(Path(str(source)).resolve()) for source in sources]
    digest = hashlib.sha256(repr(places).encode()).digest()
    return f"sources {base64.b32encode(digest)[:16].decode()}"


def free_place(path: Path, mark: str) -> Path:
    """A name for a file that nobody has named: that, or with the first number behind it that no other file has.

    Args:
        path: The usual name.
        mark: A file that has it in its head shows the same, and is replaced.
    """
    place = path
    number = 1
    while place.exists() and mark.encode() not in head_of(place):
        number += 1
        place = path.with_stem(f"{path.stem}-{number}")
    return place


def head_of(path: Path) -> bytes:
    """The beginning of a file, in which marks stand."""
    with path.open("rb") as file:
        return file.read(_HEAD)


def svg(figure: Figure, name: str) -> str:
    """A picture as an element of a page, without a background, in the colors and the font of the page.

    Args:
        figure: What was drawn.
        name: Of the picture on the page: its ids begin with it, so that those of two pictures differ.
    """
    _take_words_as_they_are(figure)
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"\sxmlns(:xlink)?=\"[^\"]*\"|\sversion=\"1.1\"", "", text).replace("xlink:href", "href")
    text = re.sub(r"<svg width=\"[^\"]*\" height=\"[^\"]*\"|<svg height=\"[^\"]*\"", "<svg", text, count=1)
    text = _FONT.sub(r"font-size: \1px", _IDS.sub(rf"\g<1>{name}-", text))
    text = _PLACES.sub(lambda found: _DIGITS.sub(r"\1", found[0]), re.sub(r"\n\s*", "\n", text))
    for drawn, color in _PAGE_COLORS.items():
        text = text.replace(drawn, color)
    return text


def _take_words_as_they_are(figure: Figure) -> None:
    """Names of runs and metrics are no formulas, whatever dollars they hold."""
    words = []
    for axes in figure.axes:
        words += [axes.title, axes.xaxis.label, axes.yaxis.label]
        legend = axes.get_legend()
        words += legend.get_texts() if legend is not None else []
    for text in words:
        text.set_parse_math(False)
