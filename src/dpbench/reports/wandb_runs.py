"""Runs that were logged to wandb, read back for `dpbench compare`."""

from __future__ import annotations

import re

import pandas as pd
import wandb

from dpbench.errors import ConfigurationError, brief
from dpbench.reports.compared import ComparedRun, marked
from dpbench.reports.table import flat_settings
from dpbench.runs.record import accusation
from dpbench.runs.sweep import JOB_TYPE

_STEPS = ("trainer/global_step", "_step")  # releases, as in metrics.csv; else rows, of runs that others logged


def recorded(place: str) -> list[ComparedRun]:
    """Runs as wandb's public API gives them.

    Args:
        place: ENTITY/PROJECT or ENTITY/PROJECT:GROUP.

    Raises:
        ConfigurationError: There are none, or wandb does not answer.
    """
    project, _, group = place.partition(":")
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", project):
        raise ConfigurationError(f"wandb:{place} names no project: write wandb:ENTITY/PROJECT or ...:GROUP behind it.")
    try:
        runs = [
            run
            for run in wandb.Api().runs(project, filters={"group": group} if group else {})
            if run.job_type != JOB_TYPE
        ]
    except (ValueError, OSError, wandb.Error) as error:
        raise ConfigurationError(f"wandb cannot list {project}: {brief(error)}") from error
    if not runs:
        raise ConfigurationError(f"wandb has no runs in {project}{f', group {group}' if group else ''}.")
    found = []
    for run in runs:
        history = run.history(pandas=True)
        step = next((name for name in _STEPS if name in history), None)
        curves = history.set_index(step) if step is not None else pd.DataFrame()
        summary = {key: value for key, value in dict(run.summary).items() if isinstance(value, int | float)}
        metrics = {key: value for key, value in summary.items() if not key.startswith("_")}
        verdict, settings = run.summary.get("privacy/audited_verdict"), flat_settings(dict(run.config))
        name = marked(run.name, accusation(verdict))
        found.append(ComparedRun(name, settings, metrics, curves, verdict=verdict, note=accusation(verdict)))
    return found
