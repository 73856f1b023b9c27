"""Frames of a table's runs: from their folders, or from a results folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.code import sources_text
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.run_rows import flat
from dpbench.harness.reproduce.jobs import Job
from dpbench.harness.reproduce.tables import MEASURES, Table, Variant, read_table, select_lines
from dpbench.harness.runs.readers import read_csv, read_metrics

RUNS = "runs.csv"
MONTAGE = "samples.png"
CURVES = "curves"
GRADIENTS = "gradient_values"
NOMINAL = "epsilon_nominal_rdp"
"""Column of runs.csv: ε at the table's nominal population."""
TRIAL = "trial"
"""Column of runs.csv, of tables with trials."""
FOREIGN = "foreign_code"
"""Column of runs.csv: packages that are not dpbench and hashes of their sources, where a table's runs use any."""

_KEY = ["row", "column", TRIAL, "seed"]
_NOT_OF_ALL = (TRIAL, NOMINAL, FOREIGN)
_RESTORE = "restore {path}, or move it away"
_END = 2  # evaluations: the last validation and the test
_POINTS = 200  # of a line

Logged = dict[str, pd.DataFrame]
"""Name of a file without its ending → columns row, column, trial (if the table has any), seed, logged values."""


def keys_of(frame: pd.DataFrame) -> pd.MultiIndex:
    """Row, column, trial and seed of each line, which identify a run."""
    keys = frame.reindex(columns=_KEY).astype({TRIAL: object}).fillna({TRIAL: ""})
    return pd.MultiIndex.from_frame(keys.astype({"row": str, "column": str, TRIAL: str, "seed": int}))


def finished_runs(table: Table, jobs: Sequence[Job]) -> pd.DataFrame:
    """One line for each finished run, with its provenance.

    Args:
        table: The definition.
        jobs: Its runs, finished or not.

    Raises:
        ConfigurationError: A run has no figure of the name that the table shows.
    """
    lines = []
    for job in jobs:
        record = job.result()
        if record is None:
            continue
        # The folder's name holds eight letters of each hash only, and a package may be edited while its run waits.
        if (record["config_hash"], record.get("foreign_code", {})) != (job.config_hash, job.foreign_code):
            continue
        metrics = record["metrics"]
        # A figure that dpbench knows may be missing for a reason; of an unknown name nobody else would tell.
        if table.metric not in {**MEASURES, **metrics}:
            raise ConfigurationError(
                f"{table.name} shows {table.metric}, which its runs do not have: they have {', '.join(metrics)}."
            )
        facts = flat(record)
        lines.append(
            {
                **dict(zip(_KEY, job.key, strict=True)),
                "metric": table.metric,
                "value": metrics.get(table.metric),
                **{name: metrics.get(name) for name in table.more},
                **{name: facts.get(key) for name, key in _OF_THE_RECORD.items()},
                FOREIGN: sources_text(job.foreign_code),
                NOMINAL: _nominal_epsilon(table, job),
                "date": date.fromtimestamp(job.run.result.stat().st_mtime).isoformat(),
                "words": " ".join(job.words),
            }
        )
    frame = pd.DataFrame(lines)
    return frame.drop(columns=[name for name in _NOT_OF_ALL if name in frame and not frame[name].any()])


_OF_THE_RECORD = {
    "epsilon_rdp": "privacy.epsilon.rdp",
    "epsilon_pld": "privacy.epsilon.pld",
    "epsilon_microbatch_rdp": "privacy.epsilon_microbatch.rdp",
    NOMINAL: "",
    "delta": "privacy.delta",
    "unit": "privacy.unit",
    "population": "privacy.population",
    "neighbouring_relation": "privacy.neighbouring_relation",
    "steps": "steps",
    "seconds": "seconds",
    "config_hash": "config_hash",
    "code_hash": "code_hash",
    FOREIGN: "",
    "commit": "commit",
    "date": "",
    "cpu": "hardware.cpu",
    "threads": "hardware.threads",
    "gpu": "hardware.gpu",
    "kernels": "hardware.kernels",
    "python": "versions.python",
    "torch": "versions.torch",
    "dpbench": "versions.dpbench",
}
"""Column of runs.csv → key in result.json; "": the column has its place here, and its value from elsewhere."""


def _nominal_epsilon(table: Table, job: Job) -> float | None:
    """Cost of the run at the table's nominal population."""
    if table.nominal is None or not job.run.ledger.is_file():
        return None
    # Here, because accountants take a second to import, and few tables have such a column.
    from dpbench.harness.runs.ledgers import read_run_ledger
    from dpbench.privacy.accounting.composition import ledger_epsilon
    from dpbench.privacy.accounting.planning import at_population

    ledger = at_population(read_run_ledger(job.run.ledger), table.nominal.population, table.nominal.batch_size)
    return ledger_epsilon(ledger, table.nominal.delta, "rdp")


def refuse_other_words(table: Table, runs: pd.DataFrame) -> None:
    """Raise ConfigurationError if runs lack values that the definition shows now, or were made by other words."""
    again = f"again (dpbench reproduce {table.command} --replace)."
    # A definition that now shows another metric would print the old figures under its name.
    lacking = {table.metric} - set(runs["metric"]) or set(table.more) - set(runs)
    if lacking:
        raise ConfigurationError(
            f"{table.folder}/{RUNS} has no {', '.join(sorted(lacking))}, which {table.name} now shows: restore the "
            f"definition, or write it {again}"
        )
    words = table.words_by_cell()
    for (*cell, _), text in zip(keys_of(runs), runs["words"], strict=True):
        if not str(text).startswith(f"{words.get(tuple(cell))} seed=".lstrip()):
            raise ConfigurationError(
                f"{table.folder}/{RUNS}: {_named(cell)} was run with other overrides than {table.name} has now: "
                f"restore the definition, or run it {again}"
            )


def _named(parts: Iterable[str]) -> str:
    return ", ".join(filter(None, parts))


def best_trials(table: Table, runs: pd.DataFrame) -> dict[tuple[str, str], tuple[Variant, int]]:
    """(row, column) → the trial with the best mean over its seeds, and how many trials have runs.

    Args:
        table: The definition.
        runs: Finished runs, as in runs.csv. Cells without runs have no best trial.
    """
    if not table.has_trials or runs.empty:
        return {}
    trials = {trial.name: trial for trial in table.trials}
    # Diverged runs have no figure: a trial of which none has one cannot be the best.
    means = runs["value"].set_axis(keys_of(runs)).groupby(level=["row", "column", TRIAL]).mean().dropna()
    best: dict[tuple[str, str], tuple[Variant, int]] = {}
    for cell, values in means.groupby(level=["row", "column"]):
        row, column = map(str, cell)  # type: ignore[arg-type]  # of two levels
        best[row, column] = trials[table.measure.best(values)[-1]], len(values)
    return best


def of_best_trials(table: Table, runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that a table shows: those of the best trial of each cell."""
    best = [(*cell, trial.name) for cell, (trial, _) in best_trials(table, runs).items()]
    return runs[keys_of(runs).droplevel("seed").isin(best)] if best else runs


def with_choices(table: Table, results: Path, config_dir: Path | None = None) -> Table:
    """Give the cells of a table the words that did best in its tuning table.

    A cell without candidates in its row and column keeps its own words.

    Args:
        table: The definition; returned as it is unless it has a `chosen_from`.
        results: Folder of the tables, with the tuning table's.
        config_dir: Further configuration, which may define the tuning table.

    Raises:
        ConfigurationError: Not all trials among which a cell chooses are finished, or the tuning table has runs of the
            seeds of this one.
    """
    if not table.chosen_from:
        return table
    tuning = read_table(table.chosen_from, config_dir)
    if not tuning.metric.startswith("val/"):
        raise ConfigurationError(
            f"{table.name} chooses from {tuning.name}, whose metric {tuning.metric} is not a validation metric."
        )
    # What was chosen on a seed is no independent test on that seed.
    if shared := set(table.seeds) & set(tuning.seeds):
        raise ConfigurationError(
            f"{table.name} and {tuning.name}, from which it chooses, share the seeds {sorted(shared)}: change the "
            "seeds of one of them."
        )
    path = results / tuning.folder / RUNS
    first = f"run it first (dpbench reproduce {tuning.command})"
    if not path.is_file():
        raise ConfigurationError(
            f"{table.name} chooses its settings from {tuning.name}, and there is no {path}: {first}."
        )
    runs = _read_runs(path)
    values = runs["value"].set_axis(keys_of(runs)).unstack("seed")
    # Not a number where a seed is missing: a trial of fewer seeds is not compared.
    means = values.reindex(columns=list(tuning.seeds)).mean(axis=1, skipna=False)
    choices = {}
    for row, column in table.cells:
        if not table.chooses(row, column):
            continue
        candidates = _candidates(table, tuning, row, column)
        scores = means.reindex(list(candidates))
        missing = scores.index[scores.isna()]
        if len(missing):
            raise ConfigurationError(
                f"{table.name} chooses {row.label}, {column.label} among {len(scores)} trials of {tuning.name}, of "
                f"which {len(missing)} are not finished in {path} (such as {candidates[missing[0]].label}): {first}."
            )
        choices[row.name, column.name] = candidates[tuning.measure.best(scores)]
    return table.model_copy(update={"choices": choices})


def _candidates(table: Table, tuning: Table, row: Variant, column: Variant) -> dict[tuple[str, ...], Variant]:
    """Candidates of a cell: cells of the tuning table that its row or its column names, with every trial."""
    refusal = f"{table.name} chooses from {tuning.name}, which has no"
    rows = select_lines(tuning.rows, row.chosen.rows + column.chosen.rows, refusal)
    columns = select_lines(tuning.columns, row.chosen.columns + column.chosen.columns, refusal)
    candidates = {}
    for parts in itertools.product(rows, columns, tuning.trials):
        candidates[tuple(part.name for part in parts)] = Variant(
            name="chosen",
            label=_named(part.label for part in parts),
            words=tuple(word for part in parts for word in part.words),
        )
    return candidates


def earlier_runs(table: Table, folder: Path) -> pd.DataFrame:
    """Read the runs that a results folder holds of a table; without its runs.csv there are none.

    Args:
        table: The definition, with the choices of its cells.
        folder: Folder of the results.

    Raises:
        ConfigurationError: runs.csv is damaged, or its runs had other words than the table gives them now: these would
            be other experiments in one table.
    """
    path = folder / RUNS
    if not path.is_file():
        return pd.DataFrame()
    runs = _read_runs(path, "words", "code_hash", "config_hash", "commit")
    refuse_other_words(table, runs)
    return runs[runs["value"].notna()]  # a run without a figure is run again


def _read_runs(path: Path, *more: str) -> pd.DataFrame:
    """Read a runs.csv that holds each run once, and further columns with words.

    Raises:
        ConfigurationError: It is damaged, or holds a run twice.
    """
    texts = ("row", "column", *more)
    runs = read_csv(path, (*texts, "seed", "value"), _RESTORE, (*texts, TRIAL, "*"))
    if not (runs["seed"] % 1 == 0).all():  # nor where one is missing
        raise ConfigurationError(f"{path} has a line without a whole number as its seed: restore it.")
    keys = keys_of(runs)
    if keys.has_duplicates:
        row, column, _, seed = keys[keys.duplicated()][0]
        raise ConfigurationError(
            f"{path} has {row}, {column}, seed {seed} twice, which would count as two runs: remove one of them."
        )
    return runs


def runs_of_other_code(runs: pd.DataFrame, jobs: Sequence[Job]) -> int:
    """Count the runs that none of the jobs would give: other code or settings made them."""
    # By configuration and not by cell: the same cell with other settings is another experiment.
    own = {(job.config_hash, job.code_hash, sources_text(job.foreign_code)) for job in jobs}
    # Older files lack columns that came later.
    hashes = runs.reindex(columns=["config_hash", "code_hash", FOREIGN]).astype(object).fillna("")
    return sum(run not in own for run in hashes.itertuples(index=False, name=None))


def joined(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Join lines of runs, or of their logs; for a run that is in both, the new ones."""
    old = old[~keys_of(old).isin(keys_of(new))]
    # An empty frame would make floats of the other's whole numbers.
    if old.empty:
        return new
    return old if new.empty else pd.concat([old, new], ignore_index=True)


def collect(table: Table, jobs: Sequence[Job]) -> Logged:
    """Read the logs of finished runs: learning curves of all, everything else of the first seed.

    Args:
        table: The definition, which names the shown values.
        jobs: Its runs, finished or not.
    """
    parts: dict[str, dict[Any, pd.DataFrame]] = {}
    for job in jobs:
        if job.result() is None:
            continue
        for name, frame in _logged_by(table, job).items():
            if len(frame):
                parts.setdefault(name, {})[job.key] = frame
    logged = {}
    for name, frames in parts.items():
        lines = pd.concat(frames, names=_KEY).reset_index(_KEY)
        logged[name] = lines if table.has_trials else lines.drop(columns=TRIAL)
    # Two points of one step are no curve.
    if CURVES in logged and logged[CURVES].groupby(["row", "column", "seed"]).size().max() <= _END:
        del logged[CURVES]
    return logged


def _logged_by(table: Table, job: Job) -> Logged:
    """Logged values of a run that a table shows, by the name of their file."""
    metrics = read_metrics(job.run.metrics).rename_axis("step")
    logged = {}
    if table.metric in metrics:
        logged[CURVES] = metrics[table.metric].dropna().rename("value").reset_index()
    if job.seed != table.seeds[0]:
        return logged
    for series in table.series:
        names = [name for name in metrics if str(name).startswith(series.metrics)]
        lines = metrics[names].set_axis([str(name).removeprefix(series.metrics) for name in names], axis=1)
        lines = lines.dropna(how="all")
        lines = lines.iloc[:: max(1, len(lines) // _POINTS)]
        logged[series.name] = lines.reset_index().melt("step", var_name="name").dropna()
    if table.histogram and job.run.gradient_histogram.is_file():
        logged[GRADIENTS] = read_csv(job.run.gradient_histogram, ["log10_from", "log10_to", "count"])
    return logged


def logged_names(table: Table) -> list[str]:
    """Names of the files of the logged values that a table shows, without their endings."""
    return [CURVES, *(series.name for series in table.series), GRADIENTS]


def read_logged(table: Table, folder: Path) -> Logged:
    """Read the logs of the runs from a results folder."""
    logged: dict[str, Any] = {}
    for name in logged_names(table):
        path = folder / f"{name}.csv"
        if path.is_file():
            # A series of one metric has lines without a name, which CSV does not tell from a missing value.
            logged[name] = pd.read_csv(path, dtype={"name": object}).fillna({"name": ""})
    return logged
