"""A table of a paper: run what is missing, then write what there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpbench.errors import ConfigurationError
from dpbench.files import is_full_disk
from dpbench.harness.reproduce._results import (
    MONTAGE,
    RUNS,
    EarlierRuns,
    collect,
    conflicting_results,
    earlier_runs,
    finished_runs,
    keys_of,
    of_best_trials,
    with_choices,
)
from dpbench.harness.reproduce._summary import markdown
from dpbench.harness.reproduce.jobs import status, sweep, table_jobs
from dpbench.harness.reproduce.tables import read_table
from dpbench.harness.run.search_path import conf_dir, groups_of, plugin_dirs
from dpbench.harness.runs.provenance import commit


@dataclass(frozen=True)
class Part:
    """Which runs of a table are made, and how they are launched.

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


Existing = Literal["stays", "replace", "keep"]
"""What becomes of a table in `--out` that other code or other runs made: it stays as it is, is overwritten, or its runs
count as done and stay in the table."""


def reproduce_table(
    name: str,
    part: Part,
    out: Path,
    runs: Path,
    only_status: bool = False,
    existing: Existing = "stays",
    config_dir: Path | None = None,
) -> tuple[str, bool]:
    """Run what is missing of a table, and write it.

    Args:
        name: PAPER/TABLE, or the path of a definition.
        part: Which part of it, and how.
        out: Where PAPER_TABLE/ with table, figure and runs.csv goes.
        runs: Where the runs themselves are kept.
        only_status: Run nothing, write nothing.
        existing: What becomes of results of other code, or of runs that are not among these.
        config_dir: Further configuration, as `dpbench train --config-dir` takes it.

    Returns:
        What to print, and whether no run has failed.

    Raises:
        ConfigurationError: There is no such table, row, column or launcher.
        Interrupted: A signal stopped it; finished runs stay.
    """
    table = with_choices(read_table(name, config_dir), out, config_dir)
    refuse_unknown_choices((*part.sweep, *part.trainer), config_dir)
    folder = out / table.folder
    selected = table.selected(part.rows, part.columns, part.seeds)
    cells = [(row.name, column.name) for row, column in selected.cells]
    # With whatever else of the table may be finished by this code.
    seeds = dict.fromkeys((*table.seeds, *selected.seeds))
    all_jobs = table_jobs(table.selected((), (), tuple(seeds)), runs, part.trainer, config_dir)
    jobs = [job for job in all_jobs if (job.row, job.column) in cells and job.seed in selected.seeds]
    earlier = earlier_runs(table, folder) if existing == "keep" else EarlierRuns()
    missing = earlier.without(jobs)
    if not only_status:
        refuse_changed_code(out)
    with full_disk_explained(runs, out):
        if not only_status:
            sweep(missing, part.sweep)
        fresh = finished_runs(table, all_jobs)
        finished = earlier.runs_with(fresh)
        text = [markdown(table, finished), "", status(missing)]
        if len(missing) < len(jobs):
            text.append(f"{len(jobs) - len(missing)} more are kept from the results that were there")
        if only_status and existing != "keep" and (folder / RUNS).is_file():
            text.append(f"{folder} holds results: --keep counts their runs as done")
        succeeded = all(job.state() != "failed" for job in missing)
        if only_status or finished.empty:
            return "\n".join(text), succeeded
        # Not before: it imports PyTorch and matplotlib, for whose seconds `--status` need not wait.
        from dpbench.harness.reproduce._outputs import keep_strips, write_montage, write_outputs

        conflict = None
        if existing != "replace":
            conflict = conflicting_results(folder, finished, any_code=existing == "keep")
        if conflict is not None:
            text.append(
                f"{folder} holds {conflict} and stays as it is: --replace overwrites it, --keep leaves its runs in the "
                "table."
            )
            folder = runs / table.folder / "table"
        best_runs = of_best_trials(table, finished)
        best_keys = set(keys_of(best_runs))
        best_jobs = [job for job in all_jobs if job.key in best_keys]
        if table.samples:
            keep_strips(best_jobs, best_runs, out / table.folder, folder)
            if cells_without := write_montage(table, folder):
                text.append(f"{MONTAGE} has no images of {'; '.join(cells_without)}")
        logged = earlier.logged_with(collect(table, best_jobs), fresh, best_runs)
        write_outputs(table, finished, logged, folder)
    return "\n".join([*text, f"written to {folder}"]), succeeded


def refuse_changed_code(out: Path) -> None:
    """Raise ConfigurationError where `results/` of the checkout would be made by code that no commit holds."""
    is_of_checkout = out.resolve() == conf_dir().parent / "results"
    if is_of_checkout and str(commit()).endswith("+changes"):
        raise ConfigurationError(
            "results/ is made by committed code, but src or conf has changes: commit them, or write elsewhere (--out)."
        )


@contextmanager
def full_disk_explained(runs: Path, out: Path) -> Iterator[None]:
    """Say in one line what a full disk has cost.

    Raises:
        ConfigurationError: In place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise ConfigurationError(
            f"no space is left for {runs} or {out}. Finished runs are kept: free some, and call the same command again."
        ) from error


def refuse_unknown_choices(words: Sequence[str], config_dir: Path | None = None) -> None:
    """Raise ConfigurationError where a word names a launcher or a trainer that there is not."""
    own = [] if config_dir is None else [config_dir]
    groups = groups_of(conf_dir(), *plugin_dirs(), *own)
    for word in words:
        group, _, choice = word.partition("=")
        if group in ("launcher", "trainer") and choice not in groups[group]:
            raise ConfigurationError(f"there is no {word}. Known: {', '.join(groups[group])}.")
