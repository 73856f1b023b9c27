"""What generators make, a strip of images for each cell of a table (pyvacy_2019, Fig. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.outputs import MONTAGE
from dpbench.reproduce.tables import Table
from dpbench.synthesis.samples import FRAME, PER_CLASS

_SHOWN = 2  # images of a class in a strip


def strip(grid: Path) -> np.ndarray:
    """Two images of each class, side by side, from the grid that a run wrote (a row for each class).

    Args:
        grid: samples.png of a run.

    Returns:
        (height, width, 3), uint8.
    """
    pixels = np.asarray(Image.open(grid).convert("RGB"))
    side = (pixels.shape[1] - FRAME) // PER_CLASS
    rows = (pixels.shape[0] - FRAME) // side
    parts = [
        pixels[row * side + FRAME : (row + 1) * side, place * side + FRAME : (place + 1) * side]
        for row in range(rows)
        for place in range(_SHOWN)
    ]
    return np.concatenate(parts, axis=1)


def write_montage(table: Table, jobs: Sequence[Job], folder: Path) -> None:
    """The images of each cell's first finished run, if the table asks for it and there are any.

    Args:
        table: The definition.
        jobs: Its runs.
        folder: Made if need be.
    """
    first: dict[tuple[str, str], Path] = {}
    for job in jobs:
        if job.result():
            first.setdefault((job.row, job.column), job.run.samples)
    cells = [(row, column) for row in table.rows for column in table.columns]
    found = [(row, column) for row, column in cells if (path := first.get((row.name, column.name))) and path.is_file()]
    if not table.samples or not found:
        return
    folder.mkdir(parents=True, exist_ok=True)
    figure = new_figure(12.0, 0.75 * len(found) + 0.4)
    for axes, (row, column) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        axes.imshow(strip(first[row.name, column.name]), interpolation="nearest")
        label = row.label if len(table.columns) == 1 else f"{row.label}\n{column.label}"
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        axes.set(xticks=[], yticks=[])
    write_figure(folder / MONTAGE, figure)
