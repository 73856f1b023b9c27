"""What generators make, a strip of images for each cell of a table (pyvacy_2019, Fig. 5)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

from dpbench.files import replacing
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.outputs import MONTAGE, STRIPS
from dpbench.reproduce.tables import Table
from dpbench.synthesis.samples import FRAME, PER_CLASS

_SHOWN = 2  # images of a class in a strip

Cell = tuple[str, str]
"""Row and column."""


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


def keep_strips(jobs: Sequence[Job], kept: Collection[Cell], folder: Path) -> None:
    """Copy the images of each cell's first finished run, so that the picture can be drawn again without the runs.

    Args:
        jobs: Runs of a table.
        kept: Cells of which the folder holds earlier runs: their images stay.
        folder: Of the results; made if need be.
    """
    first: dict[Cell, Path] = {}
    for job in jobs:
        if job.result():
            first.setdefault((job.row, job.column), job.run.samples)
    for cell, images in first.items():
        place = _place(folder, cell)
        if images.is_file() and not (cell in kept and place.is_file()):
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as new:
                Image.fromarray(strip(images)).save(new, format="png")


def write_montage(table: Table, runs: pd.DataFrame, folder: Path) -> None:
    """The images of all cells, one below the other, if the table asks for it and there are any.

    Args:
        table: The definition.
        runs: Its finished runs, as in runs.csv: images of other cells are left out.
        folder: Of the results.
    """
    held = set(zip(runs["row"], runs["column"], strict=True))
    cells = [(row, column, _place(folder, (row.name, column.name))) for row in table.rows for column in table.columns]
    found = [cell for cell in cells if (cell[0].name, cell[1].name) in held and cell[2].is_file()]
    if not table.samples or not found:
        return
    figure = new_figure(12.0, 0.75 * len(found) + 0.4)
    for axes, (row, column, place) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
        axes.imshow(np.asarray(Image.open(place)), interpolation="nearest")
        label = row.label if len(table.columns) == 1 else f"{row.label}\n{column.label}"
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        axes.set(xticks=[], yticks=[])
    write_figure(folder / MONTAGE, figure)


def _place(folder: Path, cell: Cell) -> Path:
    row, column = cell
    return folder / STRIPS / row / f"{column}.png"
