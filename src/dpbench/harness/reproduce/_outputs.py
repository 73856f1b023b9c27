"""Files of a table in `results/`: runs.csv, and from it alone table.md, table.tex, pictures and README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from PIL import Image

from dpbench.files import write_atomically
from dpbench.harness.reports.figures import new_panels, write_figure
from dpbench.harness.reports.markdown import latex_rows, markdown_rows
from dpbench.harness.reproduce._pictures import draw_logged, draw_table
from dpbench.harness.reproduce._results import (
    CURVES,
    MONTAGE,
    RUNS,
    Logged,
    best_trials,
    logged_names,
    of_best_trials,
)
from dpbench.harness.reproduce._summary import EXAMPLE, cells, late_means, summary
from dpbench.harness.reproduce.jobs import Job
from dpbench.harness.reproduce.tables import MEASURES, Table, select_cell, short_name
from dpbench.harness.runs.numbers import ABSENT
from dpbench.harness.runs.provenance import CHANGED
from dpbench.templates import render

_RELATIONS = {"add_or_remove_one": "added or removed", "replace_one": "replaced"}


def write_outputs(table: Table, runs: pd.DataFrame, logged: Logged, folder: Path) -> None:
    """Write everything into a results folder; outdated pictures are removed.

    Args:
        table: The whole definition.
        runs: Finished runs, as in runs.csv.
        logged: Logged frames, by the name of their file.
        folder: Made if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # First: everything else can be written again from it.
    write_atomically(folder / RUNS, runs.to_csv(index=False))
    rows = cells(table, runs)
    write_atomically(folder / "table.md", markdown_rows(rows) + "\n")
    write_atomically(folder / "table.tex", latex_rows(rows))
    best = of_best_trials(table, runs)
    draw_table(table, best, summary(table, best), folder)
    pictures = write_logged(table, logged, folder)
    if (folder / MONTAGE).is_file():
        pictures.append(folder / MONTAGE)
    write_atomically(folder / "README.md", _page(table, runs, pictures, logged))


def write_logged(table: Table, logged: Logged, folder: Path) -> list[Path]:
    """Write a CSV and a PNG for each; outdated ones are removed.

    Returns:
        The pictures.
    """
    pictures = []
    for name in logged_names(table):
        data = folder / f"{name}.csv"
        picture = data.with_suffix(".png")
        if name not in logged:
            data.unlink(missing_ok=True)
            picture.unlink(missing_ok=True)
            continue
        write_atomically(data, logged[name].to_csv(index=False, float_format="%.6g"))
        draw_logged(table, name, logged[name], picture)
        pictures.append(picture)
    return pictures


def _page(table: Table, runs: pd.DataFrame, pictures: Sequence[Path], logged: Logged) -> str:
    best = of_best_trials(table, runs)
    how, choices = _choices(table, runs)
    return render(
        "table.md",
        table=table,
        cells=markdown_rows(cells(table, runs)),
        relations=_listed(best["neighbouring_relation"].replace(_RELATIONS), separator=" or "),
        deltas=_listed(best["delta"].astype(float), "g"),
        units=_units(best),
        by_microbatch=best["epsilon_microbatch_rdp"].notna().any(),
        other_figures=lambda row, column: _other_figures(table, select_cell(best, row, column)),
        late=late_means(table, logged[CURVES]) if table.last_evaluations and CURVES in logged else "",
        chosen_how=how,
        choices=choices,
        pictures=pictures,
        provenance={name: _listed(runs[name].astype(object)) for name in ("commit", "cpu", "gpu", "torch")},
        runs=len(runs),
        changed=runs["commit"].astype(str).str.endswith(CHANGED).sum(),
        hours=runs["seconds"].sum() / 3600,
        threads=_listed(runs["threads"].astype(str)),
    )


def _other_figures(table: Table, cell: pd.DataFrame) -> list[str]:
    """Means of the metrics under `more`, over the runs of a cell."""
    texts = []
    for name, label in table.more.items():
        values = pd.to_numeric(cell[name], errors="coerce")
        if label is not None and name in MEASURES:
            # Under a label of its own a figure is shown as a table shows it.
            values *= MEASURES[name].scale
            texts.append(MEASURES[name].text(values.mean(), values.std()))
        else:
            texts.append(ABSENT if values.isna().all() else f"{values.mean():.3g}")
    return texts


def _choices(table: Table, runs: pd.DataFrame) -> tuple[str, dict[tuple[str, str], str]]:
    """How the settings of each cell were chosen (empty where nothing was), and which."""
    if table.choices:
        name = short_name(table.chosen_from)
        how = f"Chosen in [{name}](../{name.replace('/', '_')}/README.md), on validation data and other seeds"
        return how, {cell: variant.label for cell, variant in table.choices.items()}
    labels = {}
    for cell, (trial, number) in best_trials(table, runs).items():
        labels[cell] = trial.label if number == len(table.trials) else f"{trial.label} (of {number})"
    trials = "; ".join(trial.label for trial in table.trials)
    how = f"Each cell shows the best of {len(table.trials)} trials ({trials}) by this metric"
    return how if labels else "", labels


def _listed(values: pd.Series[Any], form: str = "", separator: str = ", ") -> str:
    """The values that there are, each once, in their order."""
    return separator.join(format(value, form) for value in sorted(values.dropna().unique()))


def _units(runs: pd.DataFrame) -> str:
    """Unit that ε protects: "one example", or "one user of 539 (unit: user), with all examples,"."""
    texts = []
    for unit, part in runs.dropna(subset="unit").groupby("unit"):
        if unit == EXAMPLE:
            texts.append("one example")
            continue
        populations = _listed(part["population"].astype(float), ",.0f", " or ") if "population" in part else ""
        texts.append(f"one {unit}{' of ' * bool(populations)}{populations} (unit: {unit}), with all examples,")
    return " or ".join(texts)


def write_montage(table: Table, jobs: Sequence[Job], folder: Path) -> list[str]:
    """Draw the images of one run of each cell side by side.

    Args:
        table: The definition.
        jobs: Runs that the table shows.
        folder: Folder of the results.

    Returns:
        Cells without images in a folder of a run, for the reader: then the picture that is there stays.
    """
    grids = {(job.row, job.column): job.run.samples for job in reversed(jobs) if job.run.samples.is_file()}
    if without := {(job.row, job.column) for job in jobs} - set(grids):
        return sorted(", ".join(cell) for cell in without)
    shown = [cell for cell in table.cells if (cell[0].name, cell[1].name) in grids]
    figure, places = new_panels(len(shown), 4, 3.0, 3.2)
    for axes, (row, column) in zip(places, shown, strict=True):
        axes.imshow(Image.open(grids[row.name, column.name]), interpolation="nearest")
        axes.set_title(table.label_of(row, column, "\n"), fontsize=8)
        axes.axis("off")
    write_figure(folder / MONTAGE, figure)
    return []
