"""What the runs of a table logged on the way: learning curves, bounds, gradient norms and values, as CSV and PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from dpbench.files import write_atomically
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.pictures import draw_curves, draw_histogram, draw_series
from dpbench.reproduce.tables import Table
from dpbench.runs.readers import read_csv, read_metrics

Logged = dict[str, pd.DataFrame]
"""Name of a file without its ending → columns row, column, trial (if the table has any), seed, and what was logged."""
CURVES, GRADIENTS = "curves", "gradient_values"
_END = 2  # evaluations: the last validation and the test
_POINTS = 200  # of a line


def collect(table: Table, jobs: Sequence[Job]) -> Logged:
    """Read the folders of finished runs: learning curves of all, everything else of the first seed.

    Args:
        table: The definition, which says what is wanted.
        jobs: Its runs, finished or not.
    """
    done = [job for job in jobs if job.result() is not None]
    first = [job for job in done if job.seed == table.seeds[0]]
    curves = _joined(done, lambda job: _curve(job, table.metric))
    evaluated = not curves.empty and curves.groupby(["row", "column", "seed"]).size().max() > _END
    found = {CURVES: curves if evaluated else pd.DataFrame()}
    for series in table.series:
        found[series.name] = _joined(first, lambda job, prefix=series.metrics: _lines(job, prefix))  # type: ignore[misc]
    if table.histogram:
        found[GRADIENTS] = _joined(first, _histogram)
    return {name: frame for name, frame in found.items() if not frame.empty}


def _joined(jobs: Sequence[Job], read: Callable[[Job], pd.DataFrame]) -> pd.DataFrame:
    parts = [read(job).assign(row=job.row, column=job.column, trial=job.trial, seed=job.seed) for job in jobs]
    parts = [part for part in parts if len(part)]
    if not parts:
        return pd.DataFrame()
    whole = pd.concat(parts)
    first = ["row", "column", "trial", "seed"] if any(job.trial for job in jobs) else ["row", "column", "seed"]
    return whole[[*first, *(name for name in whole if name not in ("row", "column", "trial", "seed"))]]


def _metrics(job: Job) -> pd.DataFrame:
    path = job.run.metrics
    return read_metrics(path).reset_index() if path.is_file() else pd.DataFrame({"step": []})


def _curve(job: Job, metric: str) -> pd.DataFrame:
    table = _metrics(job)
    if metric not in table:
        return pd.DataFrame()
    return table[["step", metric]].dropna().rename(columns={metric: "value"})


def _lines(job: Job, prefix: str) -> pd.DataFrame:
    table = _metrics(job)
    names = [str(name) for name in table if str(name).startswith(prefix)]
    table = table[["step", *names]].dropna(how="all", subset=names)
    table = table.iloc[:: max(1, len(table) // _POINTS)].rename(columns=lambda name: str(name).removeprefix(prefix))
    return table.melt("step", var_name="name", value_name="value").dropna()


def _histogram(job: Job) -> pd.DataFrame:
    path = job.run.gradient_histogram
    return read_csv(path, ["log10_from", "log10_to", "count"]) if path.is_file() else pd.DataFrame()


def read_logged(table: Table, folder: Path) -> Logged:
    """Read the series that `write_logged` wrote."""
    paths = [folder / f"{name}.csv" for name in _names(table)]
    # A series of one metric has lines without a name, which CSV does not tell from a missing value.
    found = {path.stem: pd.read_csv(path, dtype={"name": object}) for path in paths if path.is_file()}
    return {name: frame.fillna({"name": ""}) for name, frame in found.items()}


def _names(table: Table) -> list[str]:
    return [CURVES, *(series.name for series in table.series), GRADIENTS]


def write_logged(table: Table, logged: Logged, folder: Path) -> list[str]:
    """Write a CSV and a PNG for each; what is no longer there is removed.

    Returns:
        Names of the pictures.
    """
    pictures = []
    for name in _names(table):
        data, picture = folder / f"{name}.csv", folder / f"{name}.png"
        if name not in logged or logged[name].empty:
            data.unlink(missing_ok=True)
            picture.unlink(missing_ok=True)
            continue
        write_atomically(data, logged[name].to_csv(index=False, float_format="%.6g"))
        if name == CURVES:
            draw_curves(table, logged[name], picture)
        elif name == GRADIENTS:
            draw_histogram(table, logged[name], picture)
        else:
            series = next(one for one in table.series if one.name == name)
            draw_series(table, logged[name], series, picture)
        pictures.append(picture.name)
    return pictures
