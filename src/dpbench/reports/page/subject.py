"""What a page is about: runs, finished or not, and the cells of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from dpbench.errors import ConfigurationError, brief
from dpbench.reports.compared import TABLE, ComparedRun, from_record, from_table, over_seeds, told_apart
from dpbench.reports.groups import unfinished_below
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.ledgers import lost_ledger
from dpbench.runs.readers import Record, read_csv, read_json, read_metrics, steps_logged
from dpbench.runs.record import privacy_of, read_result

_NOTHING_YET: dict[str, Any] = {"epsilon": {}, "delta": None, "unit": None, "neighbouring_relation": None}
_RESTORE = "restore {path}, or make it again (dpbench reproduce)"


@dataclass(frozen=True)
class OneRun:
    """A run on the page.

    Attributes:
        folder: Its own.
        record: As result.json holds it; of an unfinished run as much of it as is known.
        finished: Whether it has a result.
        lost: What is wrong where it was private and its ledger is gone.
    """

    folder: RunFolder
    record: dict[str, Any]
    finished: bool
    lost: str | None = None

    @property
    def privacy(self) -> dict[str, Any]:
        """What it guarantees."""
        found: dict[str, Any] = self.record["privacy"]
        return found

    @property
    def config(self) -> dict[str, Any]:
        """Its settings."""
        found: dict[str, Any] = self.record["config"]
        return found

    @property
    def private(self) -> bool:
        """Whether it claims an epsilon."""
        return self.privacy.get("delta") is not None


@dataclass(frozen=True)
class Table:
    """The results of a table.

    Attributes:
        folder: Where they lie.
        runs: A line for each run.
        cells: Means over seeds.
    """

    folder: Path
    runs: pd.DataFrame
    cells: list[ComparedRun]


@dataclass(frozen=True)
class Subject:
    """All that a page shows.

    Attributes:
        sources: As they were named.
        runs: Finished ones first.
        tables: Of reproduced ones.
    """

    sources: tuple[Path, ...]
    runs: tuple[OneRun, ...]
    tables: tuple[Table, ...]

    @cached_property
    def each(self) -> list[ComparedRun]:
        """Every run by itself."""
        return told_apart(list(map(_compared, self.runs)), [run.folder.path.name for run in self.runs])

    @cached_property
    def groups(self) -> list[ComparedRun]:
        """What is compared: means over seeds of runs, and cells of tables."""
        return [*over_seeds(self.each), *(cell for table in self.tables for cell in table.cells)]

    @property
    def alone(self) -> OneRun | None:
        """The run, where it is the only one."""
        return self.runs[0] if len(self.runs) == 1 and not self.tables else None


def read_subject(sources: Sequence[Path]) -> Subject:
    """Read all that some places hold.

    Args:
        sources: Folders of runs, of sweeps, or of the results of tables.

    Raises:
        ConfigurationError: One is not there, holds nothing of ours, or a file is damaged.
    """
    runs: dict[Path, OneRun] = {}
    tables = []
    for source in sources:
        if not source.is_dir():
            raise ConfigurationError(f"{source} is {'a file' if source.exists() else 'not there'}: name a folder.")
        if (source / TABLE).is_file():
            lines = read_csv(source / TABLE, ["seed", "value"], _RESTORE, ("*",))
            tables.append(Table(source, lines, from_table(source)))
            continue
        found = [*map(_finished, finished_runs_below([source])), *map(_unfinished, unfinished_below(source))]
        if not found and RunFolder(source).begun:
            found = [_unfinished(RunFolder(source))]
        if not found:
            raise ConfigurationError(
                f"{source} holds no run of dpbench ({RunFolder.result}, {RunFolder.config}) and no table ({TABLE})."
            )
        runs |= {one.folder.path.resolve(): one for one in found}
    whole = sorted(runs.values(), key=lambda one: not one.finished)
    return Subject(tuple(sources), tuple(whole), tuple(tables))


def _compared(run: OneRun) -> ComparedRun:
    found = from_record(run.folder, run.record)
    if run.finished:
        return found
    apart = f"not finished: {run.folder}"  # it joins no mean
    return replace(found, name=f"{found.name} (not finished)", note="not finished", code=apart)


def _finished(folder: RunFolder) -> OneRun:
    lost = lost_ledger(folder)
    return OneRun(folder, read_result(folder), finished=True, lost=lost)


def _unfinished(folder: RunFolder) -> OneRun:
    """A run under way, interrupted or failed: its partial result, or what its other files tell."""
    lost = lost_ledger(folder)
    if folder.partial_result.is_file():
        record = read_json(folder.partial_result, Record, "delete {path}, it is not needed")
    else:
        config = _settings(folder)
        metrics = {str(name): float(values.dropna().iloc[-1]) for name, values in _logged(folder).items()}
        record = {"metrics": metrics, "config": config, "seed": config.get("seed"), "seconds": None, "steps": 0}
    record["steps"] = max(record["steps"], steps_logged(folder.metrics))
    record["privacy"] = privacy_of(folder.ledger) if folder.ledger.is_file() else dict(_NOTHING_YET)
    return OneRun(folder, record, finished=False, lost=lost)


def _logged(folder: RunFolder) -> pd.DataFrame:
    return read_metrics(folder.metrics).dropna(axis=1, how="all")


def _settings(folder: RunFolder) -> dict[str, Any]:
    remedy = "restore it; a resume needs it"
    try:
        config = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
        if not isinstance(config["run"]["name"], str):
            raise ValueError("run.name is no word")
    except (yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(f"{folder.config} is damaged: {brief(error)} ({remedy}).") from error
    return dict(config)
