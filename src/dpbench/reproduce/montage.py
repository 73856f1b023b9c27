"""What generators make, a strip of images for each cell of a table (pyvacy_2019, Fig. 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dpbench.files import replacing
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.outputs import MONTAGE, STRIPS
from dpbench.reproduce.tables import Table
from dpbench.synthesis.samples import FRAME, PER_CLASS

_SHOWN = 2  # images of a class in a strip
_MADE_BY = "dpbench run"

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


def keep_strips(jobs: Sequence[Job], runs: pd.DataFrame, held: Path, folder: Path) -> None:
    """Bring one run's images of each cell into the folder, so that the picture can be drawn again without the runs.

    A file says which run made it: images of a run that is not among `runs` are removed.

    Args:
        jobs: Runs of the table whose folders may be there.
        runs: Those that the table shows, as in runs.csv.
        held: Results of earlier runs, the images of which are preferred; may be the folder itself.
        folder: Of the results; made if need be.
    """
    shown: dict[Cell, list[str]] = {}
    for line in runs.to_dict("records"):
        shown.setdefault((str(line["row"]), str(line["column"])), []).append(_identity(line))
    made = [job for job in jobs if _identity(vars(job)) in shown.get((job.row, job.column), ()) and job.result()]
    fresh = {(job.row, job.column): job for job in reversed(made) if job.run.samples.is_file()}
    chosen = set()
    for cell, makers in shown.items():
        place = _place(folder, cell)
        there = next((path for path in (_place(held, cell), place) if _maker(path) in makers), None)
        if there is not None:
            _write(place, np.asarray(Image.open(there)), _maker(there))
        elif cell in fresh:
            job = fresh[cell]
            _write(place, strip(job.run.samples), _identity(vars(job)))
        else:
            continue
        chosen.add(place)
    for path in (folder / STRIPS).glob("*/*.png"):
        if path not in chosen:
            path.unlink(missing_ok=True)


def write_montage(table: Table, folder: Path) -> list[str]:
    """The images of all cells, one below the other; the picture goes where there are none.

    Args:
        table: The definition.
        folder: Of the results, with the images of each cell.

    Returns:
        Cells without images, for the reader.
    """
    cells = [(row, column, _place(folder, (row.name, column.name))) for row in table.rows for column in table.columns]
    found = [cell for cell in cells if cell[2].is_file()]
    if not found:
        (folder / MONTAGE).unlink(missing_ok=True)
    else:
        figure = new_figure(12.0, 0.75 * len(found) + 0.4)
        for axes, (row, column, place) in zip(figure.subplots(len(found), 1, squeeze=False)[:, 0], found, strict=True):
            axes.imshow(np.asarray(Image.open(place)), interpolation="nearest")
            label = row.label if len(table.columns) == 1 else f"{row.label}\n{column.label}"
            axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
            axes.set(xticks=[], yticks=[])
        write_figure(folder / MONTAGE, figure)
    return [f"{row.name}, {column.name}" for row, column, place in cells if not place.is_file()]


def _place(folder: Path, cell: Cell) -> Path:
    row, column = cell
    return folder / STRIPS / row / f"{column}.png"


def _identity(line: Mapping[Any, Any]) -> str:
    return f"{int(line['seed'])} {line['config_hash']} {line['code_hash']}"


def _maker(path: Path) -> str:
    """Which run made the images of a file; empty where there is none, it is torn, or does not say."""
    try:
        with Image.open(path) as image:
            image.load()
            return str(image.info.get(_MADE_BY, ""))
    except OSError:
        return ""


def _write(place: Path, pixels: np.ndarray, maker: str) -> None:
    said = PngInfo()
    said.add_text(_MADE_BY, maker)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as new:
        Image.fromarray(pixels).save(new, format="png", pnginfo=said)
