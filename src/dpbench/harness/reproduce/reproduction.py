"""A table of a paper: run the missing jobs, then write the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.files import is_full_disk
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reproduce._results import (
    MONTAGE,
    collect,
    earlier_runs,
    finished_runs,
    joined,
    keys_of,
    of_best_trials,
    read_logged,
    runs_of_other_code,
    with_choices,
)
from dpbench.harness.reproduce._summary import cells
from dpbench.harness.reproduce.jobs import Job, require_launcher, status, sweep, table_jobs
from dpbench.harness.reproduce.tables import Table, read_table
from dpbench.harness.run.search_path import conf_dir
from dpbench.harness.runs.provenance import CHANGED, commit


@dataclass(frozen=True)
class Part:
    """The runs of a table to be made, and their launcher.

    Attributes:
        rows: Names, none for all.
        columns: Names, none for all.
        seeds: How many, or which; None for the table's own.
        trainer: Word for every run, such as trainer=gpu, if any.
        sweep: Words for Hydra: the launcher and its settings.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    seeds: tuple[int, ...] | int | None = None
    trainer: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()


Existing = Literal["refuse", "replace", "keep"]
"""Treatment of runs in `--out` that other code or settings made: refused, overwritten, or counted as done."""


def reproduce_table(
    name: str,
    part: Part,
    out: Path,
    runs: Path,
    only_status: bool = False,
    existing: Existing = "refuse",
    config_dir: Path | None = None,
) -> tuple[str, bool]:
    """Run the missing jobs of a table, and write it.

    Args:
        name: PAPER/TABLE, or the path of a definition.
        part: Part of it to run, and its launcher.
        out: Parent folder of PAPER_TABLE/ with table, figure and runs.csv.
        runs: Folder of the runs themselves.
        only_status: Run nothing, write nothing.
        existing: Treatment of runs of other code or settings that the results hold.
        config_dir: Further configuration, as `dpbench train --config-dir` takes it.

    Returns:
        Text to print, and True unless a run has failed.

    Raises:
        ConfigurationError: There is no such table, row, column or launcher, or `out` holds runs of other code.
        Interrupted: A signal stopped it; finished runs stay.
    """
    require_launcher(part.sweep, config_dir)
    table = with_choices(read_table(name, config_dir), out, config_dir)
    folder = out / table.folder
    selected = table.selected(part.rows, part.columns, part.seeds)
    places = [(row.name, column.name) for row, column in selected.cells]
    # With whatever else of the table may be finished by this code.
    seeds = dict.fromkeys((*table.seeds, *selected.seeds))
    all_jobs = table_jobs(table.selected((), (), tuple(seeds)), runs, part.trainer, config_dir)
    jobs = [job for job in all_jobs if (job.row, job.column) in places and job.seed in selected.seeds]
    earlier = pd.DataFrame() if existing == "replace" else earlier_runs(table, folder)
    others = runs_of_other_code(earlier, all_jobs)
    if others and existing == "refuse":
        if not only_status:
            raise ConfigurationError(
                f"{folder} holds {others} run(s) of other code, settings or seeds: --replace overwrites them, --keep "
                "leaves them in the table, --out writes elsewhere."
            )
        earlier = pd.DataFrame()
    kept = keys_of(earlier)
    missing = [job for job in jobs if job.key not in kept]
    with full_disk_explained(runs, out):
        if not only_status:
            refuse_changed_code(out)
            if missing:
                print(_announced(table, selected, missing), file=sys.stderr)
            sweep(missing, part.sweep)
        finished = joined(earlier, finished_runs(table, all_jobs))
        text = [markdown_rows(cells(table, finished)), "", status(missing)]
        if len(missing) < len(jobs):
            text.append(f"{len(jobs) - len(missing)} more are kept from the results that were there")
        succeeded = all(job.state() != "failed" for job in missing)
        if only_status or finished.empty:
            return "\n".join(text), succeeded
        # Not before: it imports PyTorch and matplotlib, for whose seconds `--status` need not wait.
        from dpbench.harness.reproduce._outputs import write_montage, write_outputs

        best_keys = keys_of(of_best_trials(table, finished))
        best_jobs = [job for job in all_jobs if job.key in best_keys]
        folder.mkdir(parents=True, exist_ok=True)
        if table.samples and (without := write_montage(table, best_jobs, folder)):
            text.append(f"{MONTAGE} is not drawn, as no folder here has images of {'; '.join(without)}")
        logged = collect(table, best_jobs)
        for series, lines in read_logged(table, folder).items():
            old = lines[keys_of(lines).isin(kept.intersection(best_keys))]
            if len(old):
                logged[series] = joined(old, logged.get(series, pd.DataFrame()))
        write_outputs(table, finished, logged, folder)
    return "\n".join([*text, f"written to {folder}"]), succeeded


def _announced(table: Table, selected: Table, missing: Sequence[Job]) -> str:
    """Say what will be run, and for how long."""
    hours = table.hours * len(missing) / (len(table.cells) * len(table.trials) * len(table.seeds))
    seeds = ", ".join(map(str, selected.seeds))
    return f"{table.name}: {len(missing)} run(s) with seed(s) {seeds}, about {hours:.2g} h on two cores"


def refuse_changed_code(out: Path) -> None:
    """Raise ConfigurationError where `results/` of the checkout would be made by code that no commit holds."""
    is_of_checkout = out.resolve() == conf_dir().parent / "results"
    if is_of_checkout and str(commit()).endswith(CHANGED):
        raise ConfigurationError(
            "results/ is made by committed code, but src or conf has changes: commit them, or write elsewhere (--out)."
        )


@contextmanager
def full_disk_explained(runs: Path, out: Path) -> Iterator[None]:
    """Within, explain the consequences of a full disk in one line.

    Raises:
        ConfigurationError: A file did not fit; raised in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise ConfigurationError(
            f"no space is left for {runs} or {out}. Finished runs are kept: free some, and call the same command again."
        ) from error
