"""The pictures of a table: its cells with intervals, what its runs logged, and what their generators make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dpbench.files import replacing
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce._jobs import Job
from dpbench.reproduce._results import CURVES, GRADIENTS, MONTAGE, STRIPS
from dpbench.reproduce.tables import Series, Table, Variant, select_cell
from dpbench.synthesis.samples import FRAME, PER_CLASS

_FEW = 2  # runs, which say nothing about their spread
_STYLES = ("-", "--", ":", "-.")
_TOGETHER = 12  # curves in one panel
_ROOM = (0.03, 0.97)  # quantiles of a curve's values between which the axis always reaches
_IMAGES = 2  # of a class in a strip
_MAKER = "dpbench run"


def draw_table(table: Table, runs: pd.DataFrame, lines: pd.DataFrame, folder: Path) -> None:
    """Draw figure.png and figure.pdf: runs as dots, 95 % intervals of the means, the paper's figures as crosses.

    Rows and columns of which nothing was run are left out.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv.
        lines: A line for each cell, see `_outputs.summary`.
        folder: Where to.
    """
    rows = [row.name for row in table.rows if (runs["row"] == row.name).any()]
    columns = [column.name for column in table.columns if (runs["column"] == column.name).any()]
    if rows and columns:
        table = table.selected(rows, columns, None)
        lines = lines[lines["row"].isin(rows) & lines["column"].isin(columns)]
    figure = new_figure(8.0, 1.6 + len(table.rows) * (0.25 + 0.17 * len(table.columns)))
    axes = figure.add_subplot()
    runs = runs.assign(value=table.measure.scale * runs["value"])
    # Columns of a row lie below each other, so that their intervals do not cover one another.
    for number, column in enumerate(table.columns):
        color = f"C{number % 10}"
        shift = (number - (len(table.columns) - 1) / 2) * 0.7 / len(table.columns)
        heights = {row.name: place + shift for place, row in enumerate(table.rows)}
        part = runs[(runs["column"] == column.name) & runs["row"].isin(list(heights))]
        axes.plot(part["value"], part["row"].map(heights), ".", color=color, alpha=0.45, markersize=5)
        cells = lines[lines["column"] == column.name]
        height = cells["row"].map(heights)
        half = cells["half"].where(cells["n"] > _FEW)
        axes.errorbar(cells["mean"], height, xerr=half, fmt="o", color=color, capsize=3, label=f"{column.label}, ours")
        if cells["paper"].notna().any():
            axes.plot(cells["paper"], height, "x", color=color, markersize=9, label=f"{column.label}, paper")
    axes.set_yticks(range(len(table.rows)), [row.label for row in table.rows], fontsize=8)
    axes.invert_yaxis()
    values = pd.concat([runs["value"], lines["paper"]]).dropna()
    if len(values):
        # Of what was measured, not of the intervals: those of few runs that differ much may be wider than the picture.
        least = 1.0 if table.measure.percent else 0.05 * float(values.abs().max()) or 1.0
        margin = max(least, 0.15 * float(values.max() - values.min()))
        axes.set_xlim(
            max(table.measure.least, float(values.min()) - margin),
            min(table.measure.most, float(values.max()) + margin),
        )
    axes.set_xlabel(table.measure.label)
    axes.set_title(table.title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    for suffix in ("png", "pdf"):
        write_figure(folder / f"figure.{suffix}", figure)


def draw_logged(table: Table, name: str, frame: pd.DataFrame, path: Path) -> None:
    """Draw something that the runs of a table logged.

    Args:
        table: The definition.
        name: Of the curves, of the values of gradients, or of one of the definition's series.
        frame: Columns row and column, and what was logged.
        path: The picture.
    """
    if name == CURVES:
        figure = _curves(table, frame)
    elif name == GRADIENTS:
        figure = _histograms(table, frame)
    else:
        figure = _series(table, frame, next(series for series in table.series if series.name == name))
    figure.suptitle(table.title, fontsize=10)
    write_figure(path, figure)


def _cell_label(table: Table, row: Variant, column: Variant, separator: str = "; ") -> str:
    return row.label if len(table.columns) == 1 else f"{row.label}{separator}{column.label}"


def _curves(table: Table, curves: pd.DataFrame) -> Figure:
    """Learning curves: the mean over seeds after each evaluation, and the range of the seeds.

    Rows have colors. Columns have line styles, or panels where that were too many lines.
    """
    curves = curves.assign(value=table.measure.scale * curves["value"])
    panels = [list(table.columns)]
    if curves.groupby(["row", "column"]).ngroups > _TOGETHER:
        panels = [[column] for column in table.columns]
    figure = new_figure(8.0 if len(panels) == 1 else 2.0 + 3.5 * len(panels), 4.5)
    places = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, columns in zip(places, panels, strict=True):
        for number, row in enumerate(table.rows):
            for column, style in zip(columns, _STYLES * len(columns), strict=False):
                part = select_cell(curves, row, column)
                label = row.label if len(columns) == 1 else f"{row.label}; {column.label}"
                if len(part):
                    _draw_curve(axes, part, style, f"C{number % 10}", label)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(panels) > 1:
            axes.set_title(columns[0].label, fontsize=9)
    places[0].set_ylim(*_curve_limits(table, curves))
    places[0].set_ylabel(table.measure.label)
    places[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _curve_limits(table: Table, curves: pd.DataFrame) -> tuple[float, float]:
    """Of the axis: the worst of the first steps may be cut, never where a run ends."""
    last = curves.sort_values("step").groupby(["row", "column", "seed"])["value"].last()
    low, high = curves["value"].quantile(_ROOM)
    if table.measure.lower_is_better:
        return 0.0, 1.05 * max(float(high), float(last.max()))
    unit = table.measure.scale / 100
    lowest = min(float(low), float(last.min())) - 2 * unit
    highest = float(curves["value"].max()) + 0.5 * unit
    return max(table.measure.least, lowest), min(table.measure.most, highest)


def _draw_curve(axes: Axes, part: pd.DataFrame, style: str, color: str, label: str) -> None:
    steps = part.groupby("step")["value"].agg(["mean", "min", "max"])
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps.index, steps["mean"], style, color=color, label=label, linewidth=1.3, marker=marker)
    axes.fill_between(steps.index, steps["min"], steps["max"], color=color, alpha=0.15, linewidth=0)


def _series(table: Table, lines: pd.DataFrame, series: Series) -> Figure:
    """Values against steps: a panel for each cell, or for each column where a cell has but one line.

    Names that end in "bias" are dashed.
    """
    one_line_each = lines.groupby(["row", "column"])["name"].nunique().max() == 1
    panels: dict[str, dict[str, pd.DataFrame]] = {}
    for column in table.columns:
        for row in table.rows:
            part = select_cell(lines, row, column)
            if part.empty:
                continue
            if one_line_each:
                panels.setdefault(column.label, {})[row.label] = part
            else:
                by_name: Any = part.groupby("name", sort=False)
                panels[_cell_label(table, row, column)] = dict(list(by_name))
    across = len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels)))
    down = math.ceil(len(panels) / across)
    figure = new_figure(5.5 * across, 4.0 * down)
    places = figure.subplots(down, across, squeeze=False).flatten()
    # The grid may have more places than there are panels.
    for axes in places[len(panels) :]:
        axes.remove()
    for axes, (title, curves) in zip(places, panels.items(), strict=False):
        for name, values in curves.items():
            style = "--" if name.endswith("bias") else "-"
            axes.plot(values["step"], values["value"], style, label=name, linewidth=1.1)
        axes.set(yscale=series.scale, xlabel="step", ylabel=series.label)
        if series.scale == "linear" and lines["value"].min() >= 0:
            axes.set_ylim(bottom=0)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _histograms(table: Table, counts: pd.DataFrame) -> Figure:
    """How large the values of gradients are, all steps and parameters together: a panel for each cell.

    The frame has columns log10_from, log10_to and count; the first bin holds the zeros.
    """
    panels = {}
    for row in table.rows:
        for column in table.columns:
            part = select_cell(counts, row, column)
            if len(part):
                panels[_cell_label(table, row, column)] = part
    figure = new_figure(5.0 * len(panels), 3.6)
    places = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (label, part) in zip(places, panels.items(), strict=True):
        share = part["count"] / part["count"].sum()
        is_inner = np.isfinite(part["log10_from"]) & np.isfinite(part["log10_to"])
        inner = part[is_inner]
        width = inner["log10_to"] - inner["log10_from"]
        axes.bar(inner["log10_from"], share[is_inner], width=width, align="edge", color="#3060a8")
        zeros = 100 * share[~np.isfinite(part["log10_from"])].sum()
        axes.set_title(f"{label} ({zeros:.0f} % are below 1e-9)", fontsize=9)
        axes.set(xlabel="log10 |value of a record's gradient|", ylabel="share of values")
        axes.grid(alpha=0.3)
    return figure


def strip(grid: Path) -> np.ndarray:
    """Cut two images of each class, side by side, out of the grid that a run wrote (a row for each class).

    Args:
        grid: samples.png of a run.

    Returns:
        (height, width, 3), uint8.
    """
    pixels = np.asarray(Image.open(grid).convert("RGB"))
    side = (pixels.shape[1] - FRAME) // PER_CLASS
    rows = (pixels.shape[0] - FRAME) // side
    parts = []
    for row in range(rows):
        for place in range(_IMAGES):
            top = row * side
            left = place * side
            parts.append(pixels[top + FRAME : top + side, left + FRAME : left + side])
    return np.concatenate(parts, axis=1)


def keep_strips(jobs: Sequence[Job], runs: pd.DataFrame, earlier: Path, folder: Path) -> None:
    """Bring one run's images of each cell into the folder, so that the picture can be drawn again without the runs.

    A file says which run made it: images of a run that is not among `runs` are removed.

    Args:
        jobs: Runs of the table whose folders may be there.
        runs: Those that the table shows, as in runs.csv.
        earlier: Results of earlier runs, the images of which are preferred; may be the folder itself.
        folder: Of the results; made if need be.
    """
    grids = {}
    for job in jobs:
        if job.result() is not None and job.run.samples.is_file():
            grids[_identity(vars(job))] = job.run.samples
    written = set()
    for (row, column), part in runs.groupby(["row", "column"]):
        place = _place(folder, row, column)
        makers = [_identity(line) for line in part.to_dict("records")]
        files = [path for path in (_place(earlier, row, column), place) if _maker(path) in makers]
        fresh = [maker for maker in makers if maker in grids]
        # Images that are there first: those of another run would change a picture whose figures have not changed.
        if files:
            _write(place, np.asarray(Image.open(files[0])), _maker(files[0]))
        elif fresh:
            _write(place, strip(grids[fresh[0]]), fresh[0])
        else:
            continue
        written.add(place)
    for path in (folder / STRIPS).glob("*/*.png"):
        if path not in written:
            path.unlink(missing_ok=True)


def write_montage(table: Table, folder: Path) -> list[str]:
    """Draw the images of all cells, one below the other; the picture goes where there are none.

    Args:
        table: The definition.
        folder: Of the results, with the images of each cell.

    Returns:
        Cells without images, for the reader.
    """
    strips = {}
    without = []
    for row in table.rows:
        for column in table.columns:
            place = _place(folder, row.name, column.name)
            if place.is_file():
                strips[place] = _cell_label(table, row, column, "\n")
            else:
                without.append(f"{row.name}, {column.name}")
    if not strips:
        (folder / MONTAGE).unlink(missing_ok=True)
        return without
    figure = new_figure(12.0, 0.75 * len(strips) + 0.4)
    places = figure.subplots(len(strips), 1, squeeze=False)[:, 0]
    for axes, (path, label) in zip(places, strips.items(), strict=True):
        axes.imshow(np.asarray(Image.open(path)), interpolation="nearest")
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        axes.set(xticks=[], yticks=[])
    write_figure(folder / MONTAGE, figure)
    return without


def _place(folder: Path, row: object, column: object) -> Path:
    return folder / STRIPS / str(row) / f"{column}.png"


def _identity(run: Mapping[Any, Any]) -> str:
    return f"{int(run['seed'])} {run['config_hash']} {run['code_hash']}"


def _maker(path: Path) -> str:
    """Which run made the images of a file; empty where there is none, it is torn, or does not say."""
    try:
        with Image.open(path) as image:
            image.load()
            return str(image.info.get(_MAKER, ""))
    except OSError:
        return ""


def _write(place: Path, pixels: np.ndarray, maker: str) -> None:
    text = PngInfo()
    text.add_text(_MAKER, maker)
    place.parent.mkdir(parents=True, exist_ok=True)
    with replacing(place) as new:
        Image.fromarray(pixels).save(new, format="png", pnginfo=text)
