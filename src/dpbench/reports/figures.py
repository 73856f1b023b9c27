"""Figures without a display and without global state, written whole or not at all."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpbench.files import replacing

_UNDATED = {".pdf": {"CreationDate": None}}  # the same figure is the same file
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_PLACES = re.compile(r" (?:d|x|y|transform)=\"[^\"]*\"")
_DIGITS = re.compile(r"(\.\d)\d+")  # a tenth of a point is all that a screen shows
_FONT = re.compile(r"font: (?:[\w.]+ )*?([\d.]+)px [^;\"]*")
_IDS = re.compile(r"(id=\"|url\(#|href=\"#)")


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that needs no display and no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(path: Path, figure: Figure) -> Path:
    """Write a picture atomically, in the format that its name ends in."""
    _take_words_as_they_are(figure)
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format=path.suffix[1:], metadata=_UNDATED.get(path.suffix))
    return path


def svg(figure: Figure, name: str, colors: Mapping[str, str]) -> str:
    """A picture as an element for a page, without a background, its text as text in the font of the page.

    Args:
        figure: What was drawn.
        name: Of the picture on the page: its ids begin with it, so that those of two pictures differ.
        colors: Colors as the drawing has them (#rrggbb) → as the page calls them (var(--ink), say).
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
    for drawn, called in colors.items():
        text = text.replace(drawn, called)
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
