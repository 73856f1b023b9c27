"""The table of a sweep in wandb: one more run in the group of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpbench.files import typed
from dpbench.run.kept_loggers import kept
from dpbench.run.wandb_log import KEPT, begin, wandb_mode
from dpbench.runs.folder import RunFolder
from dpbench.runs.sweep import JOB_TYPE

TABLE = "sweep"


def log_table(
    folder: Path, run: RunFolder, options: Mapping[str, Any], columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> str | None:
    """Log the table of a sweep, and end wandb's run again.

    Args:
        folder: Of the sweep; wandb's files go below it.
        run: One of the sweep's, whose group and tags the table gets.
        options: Of that run's logger.
        columns: Headings.
        rows: Cells; numbers stay numbers.

    Returns:
        How to see it: the command that uploads it, or its address; None where wandb is disabled.
    """
    import wandb

    own = kept(run, KEPT)
    group = own.get("group") or folder.name
    told = {key: options[key] for key in ("entity", "notes") if options.get(key) is not None}
    who = {"name": f"{group} table", "group": group, "tags": own.get("tags"), "job_type": JOB_TYPE, **told}
    here = folder.absolute()
    experiment = begin(wandb_mode(options["mode"]), who, project=options["project"], dir=str(here))
    try:
        if experiment.disabled is True:
            return None
        cells: list[Any] = [[_cell(value) for value in row] for row in rows]
        experiment.log({TABLE: wandb.Table(columns=list(columns), data=cells, allow_mixed_types=True)})
        if not experiment.offline:
            return str(experiment.url)
        return f"wandb sync {typed(Path(experiment.dir).parent)}"
    finally:
        wandb.finish()


def _cell(value: Any) -> Any:
    """An absent figure is empty, an infinite one a word: neither is a number in JSON."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "inf"
