"""Figures without a display and without global state, written whole or not at all."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpbench.files import replacing

_UNDATED = {".pdf": {"CreationDate": None}}  # the same figure is the same file
COLORS = ("#3060a8", "#c04030", "#508850", "#a070b0", "#c09020")
"""Blue, red, green, purple and yellow of our drawings."""
BLUE = COLORS[0]
RED = COLORS[1]
GRAY = "#808080"


class FolderPicture(NamedTuple):
    """A picture that a capability leaves in the folder of a run or sweep, and a report shows in a section of its own.

    Attributes:
        section: Name of the section.
        title: Title above it.
        file: Name of the file, a PNG.
        words: Alternative text.
    """

    section: str
    title: str
    file: str
    words: str


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
    """Put one legend for all panels at their side, each label once."""
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


def write_figure(path: Path, figure: Figure) -> Path:
    """Write a picture atomically, in the format that its name ends in.

    Args:
        path: The file.
        figure: The figure.
    """
    _take_words_as_they_are(figure)
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format=path.suffix[1:], metadata=_UNDATED.get(path.suffix))
    return path


def svg(figure: Figure, name: str) -> str:
    """Embed a picture in a page, as an image element.

    Args:
        figure: The figure.
        name: Alternative text.
    """
    _take_words_as_they_are(figure)
    file = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f'<img alt="{name}" src="data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _take_words_as_they_are(figure: Figure) -> None:
    """Show names of runs and metrics as they are: dollars in them start no formula."""
    words = []
    for axes in figure.axes:
        words += [axes.title, axes.xaxis.label, axes.yaxis.label]
        legend = axes.get_legend()
        words += legend.get_texts() if legend is not None else []
    for text in words:
        text.set_parse_math(False)
