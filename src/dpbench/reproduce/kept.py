"""Runs that a results folder already holds: with `--keep` they count as done, whatever machine or code made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from dpbench.errors import ConfigurationError
from dpbench.reproduce.choices import RUNS, TRIAL, trials_of
from dpbench.reproduce.jobs import Job
from dpbench.reproduce.logged import Logged, read_logged
from dpbench.reproduce.outputs import MONTAGE, STRIPS, refuse_other_words
from dpbench.reproduce.tables import Table
from dpbench.runs.readers import read_csv

Key = tuple[str, str, str, int]
"""Row, column, trial and seed of a run."""


@dataclass(frozen=True)
class Kept:
    """What is taken over from a results folder.

    Attributes:
        runs: Lines of its runs.csv.
        logged: What these runs logged on the way, as far as the folder holds it.
    """

    runs: pd.DataFrame = field(default_factory=pd.DataFrame)
    logged: Logged = field(default_factory=dict)

    def without(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of the jobs that are not among the kept runs."""
        held = set(_keys(self.runs))
        return [job for job in jobs if _key(job) not in held]

    def runs_with(self, new: pd.DataFrame) -> pd.DataFrame:
        """The kept runs and new ones; one that is in both counts once, as the new one."""
        return _joined(self.runs, new, set(_keys(self.runs)) - set(_keys(new)))

    def logged_with(self, new: Logged, fresh: pd.DataFrame, shown: pd.DataFrame) -> Logged:
        """What the runs logged that a table shows.

        Args:
            new: What the new runs logged, of those that are shown.
            fresh: Lines of the new runs.
            shown: Lines of all that the table shows.
        """
        old = set(_keys(shown)) - set(_keys(fresh))
        nothing = pd.DataFrame()
        names = dict.fromkeys((*self.logged, *new))
        return {name: _joined(self.logged.get(name, nothing), new.get(name, nothing), old) for name in names}


def kept_runs(table: Table, folder: Path, jobs: Sequence[Job]) -> Kept:
    """Take over what a results folder holds of a table.

    Args:
        table: The definition, with what its cells have chosen.
        folder: With runs.csv, and what its runs logged; nothing there keeps nothing.
        jobs: The runs of the table now.

    Raises:
        ConfigurationError: runs.csv is damaged, or its runs had other words than the table gives them now: these would
            be other experiments in one table.
    """
    if not (folder / RUNS).is_file():
        return Kept()
    if table.samples and (folder / MONTAGE).is_file() and not list((folder / STRIPS).glob("*/*.png")):
        raise ConfigurationError(
            f"{folder} has {MONTAGE}, but not the images of which it is made (an older version wrote it): "
            "they would be lost. Leave --keep out."
        )
    names = ("row", "column", "words", "code_hash", "config_hash", "commit")
    remedy = "restore {path}, or move it away"
    runs = read_csv(folder / RUNS, (*names, "seed", "value"), remedy, (*names, TRIAL, "*"))
    if not (runs["seed"] % 1 == 0).all():  # nor where one is missing
        raise ConfigurationError(f"{folder / RUNS} has a line without a whole number as its seed: restore it.")
    refuse_other_words(table, runs)
    if len(again := runs[pd.Series(_keys(runs), index=runs.index).duplicated()]):
        row, column, seed = again.iloc[0][["row", "column", "seed"]]
        raise ConfigurationError(
            f"{folder / RUNS} has {row}, {column}, seed {seed} twice, which would count as two runs: leave one of them."
        )
    now = {_key(job): _without(table.later, job.words) for job in jobs}
    words = dict(zip(_keys(runs), (_without(table.later, words.split(" ")) for words in runs["words"]), strict=True))
    if other := [key for key, had in words.items() if key in now and now[key] != had]:
        row, column, trial, seed = other[0]
        named = ", ".join(part for part in (row, column, trial, f"seed {seed}") if part)
        raise ConfigurationError(
            f"{folder / RUNS}: {named} was run as `{words[other[0]]}`, and is `{now[other[0]]}` now: give the "
            "same words (trainer=), or another --out."
        )
    return Kept(runs[runs["value"].notna()], read_logged(table, folder))


def _without(later: Sequence[str], words: Sequence[str]) -> str:
    """Words without those of options that the runs of before did not have."""
    return " ".join(word for word in words if word not in later)


def _key(job: Job) -> Key:
    return job.row, job.column, job.trial, job.seed


def _keys(frame: pd.DataFrame) -> list[Key]:
    if frame.empty:
        return []
    cells = zip(frame["row"].astype(str), frame["column"].astype(str), trials_of(frame), frame["seed"], strict=True)
    return [(row, column, trial, int(seed)) for row, column, trial, seed in cells]


def _joined(old: pd.DataFrame, new: pd.DataFrame, kept: set[Key]) -> pd.DataFrame:
    """Lines of the kept keys, and all new ones."""
    parts = [old[[key in kept for key in _keys(old)]] if len(old) else old, new]
    return pd.concat([part for part in parts if len(part)], ignore_index=True) if any(map(len, parts)) else new
