"""A table of a paper: run what is missing, then write what there is."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dpbench.errors import ConfigurationError
from dpbench.reproduce.choices import best_trials, of_best_trials, with_choices
from dpbench.reproduce.jobs import Job, table_jobs
from dpbench.reproduce.kept import Kept, kept_runs
from dpbench.reproduce.logged import collect
from dpbench.reproduce.outputs import MONTAGE, conflicting_results, finished_runs, markdown, write_outputs
from dpbench.reproduce.sweep import status, sweep
from dpbench.reproduce.tables import Table, read_table
from dpbench.run.search_path import conf_dir, groups_of, plugin_dirs


@dataclass(frozen=True)
class Part:
    """Which runs of a table are wanted, and how they are launched.

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


Held = Literal["stays", "replace", "keep"]
"""What becomes of a table in `--out` that other code or other runs made: it stays as it is, is overwritten, or its runs
count as done and stay in the table."""


def reproduce_table(
    name: str, part: Part, out: Path, runs: Path, only_status: bool = False, held: Held = "stays"
) -> tuple[str, bool]:
    """Run what is missing of a table, and write it.

    Args:
        name: PAPER/TABLE, or the path of a definition.
        part: Which part of it, and how.
        out: Where PAPER_TABLE/ with table, figure and runs.csv goes.
        runs: Where the runs themselves are kept.
        only_status: Run nothing, write nothing.
        held: What becomes of results of other code, or of runs that are not among these.

    Returns:
        What to print, and whether no run has failed.

    Raises:
        ConfigurationError: There is no such table, row, column or launcher.
        Interrupted: A signal stopped it; finished runs stay.
    """
    try:
        return _reproduced(read_table(name, conf_dir()), part, out, runs, only_status, held)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigurationError(
            f"no space is left for {runs} or {out}. Finished runs are kept: free some, and call the same command again."
        ) from error


def _reproduced(table: Table, part: Part, out: Path, runs: Path, only_status: bool, held: Held) -> tuple[str, bool]:
    conf = conf_dir()
    table = with_choices(table, conf, out)
    refuse_unknown_choices((*part.sweep, *part.trainer))
    selected = table.selected(part.rows, part.columns, part.seeds)
    jobs = table_jobs(selected, conf, runs, part.trainer)
    # Whatever is finished of the whole table goes into it, by this code, not only what was asked for now.
    whole = table.selected((), (), max(len(table.seeds), len(selected.seeds)))
    every = (*table_jobs(whole, conf, runs, part.trainer), *jobs)
    known = list({(job.row, job.column, job.trial, job.seed): job for job in every}.values())
    kept = kept_runs(table, out / table.folder, known) if held == "keep" else Kept()
    if not only_status:
        sweep(kept.without(jobs), conf, part.sweep)
    fresh = finished_runs(table, known)
    finished = kept.runs_with(fresh)
    text = [markdown(table, finished), "", _status(jobs, kept)]
    good = not any(job.state() == "failed" for job in kept.without(jobs))
    if only_status or finished.empty:
        return "\n".join(text), good
    folder = out / table.folder
    if held != "replace" and (other := conflicting_results(folder, finished, held == "keep")) is not None:
        text.append(
            f"{folder} holds {other} and stays as it is: --replace overwrites it, --keep leaves its runs in the table."
        )
        folder = runs / table.folder / "table"
    from dpbench.reproduce.montage import keep_strips, write_montage  # brings Lightning: a listing need not wait for it

    best = {cell: trial.name for cell, (trial, _) in best_trials(table, finished).items()}
    shown = [job for job in known if job.trial == best.get((job.row, job.column), job.trial)]
    winners = of_best_trials(table, finished)
    if table.samples:
        keep_strips(shown, winners, out / table.folder, folder)
        if missing := write_montage(table, folder):
            text.append(f"{MONTAGE} has no images of {'; '.join(missing)}")
    logged = kept.logged_with(collect(table, shown), fresh, winners)
    write_outputs(table, finished, logged, folder)
    return "\n".join([*text, f"written to {folder}"]), good


def refuse_unknown_choices(words: Sequence[str]) -> None:
    """Raise ConfigurationError where a word names a launcher or a trainer that there is not."""
    for word in words:
        group, _, choice = word.partition("=")
        if group in ("launcher", "trainer") and choice not in (choices := groups_of(conf_dir(), *plugin_dirs())[group]):
            raise ConfigurationError(f"there is no {word}. Known: {', '.join(choices)}.")


def _status(jobs: Sequence[Job], kept: Kept) -> str:
    """Count the runs by state, and those that were taken over."""
    missing = kept.without(jobs)
    taken = len(jobs) - len(missing)
    return status(missing) + (f"\n{taken} more are kept from the results that were there" if taken else "")
