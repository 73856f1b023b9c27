"""Figures without a display and without global state, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that needs no display and no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(path: Path, figure: Figure) -> Path:
    """Write a PNG atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, dpi=130, format="png")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
