"""Figures without a display and without global state, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpbench.files import replacing

_UNDATED = {".pdf": {"CreationDate": None}}  # the same figure is the same file


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that needs no display and no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(path: Path, figure: Figure) -> Path:
    """Write a picture atomically, in the format that its name ends in."""
    with replacing(path) as new:
        figure.savefig(new, dpi=130, format=path.suffix[1:], metadata=_UNDATED.get(path.suffix))
    return path
