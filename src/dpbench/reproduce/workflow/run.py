"""`dpbench workflow`: a power check, a calibration on noise, then training on the data, all of it resumable."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbench.errors import ConfigurationError
from dpbench.reproduce.jobs import Job, table_jobs
from dpbench.reproduce.run_table import refuse_unknown_choices
from dpbench.reproduce.sweep import status, sweep
from dpbench.reproduce.workflow.measure import POWER, Outcome, choose, recall_of, trained
from dpbench.reproduce.workflow.page import (
    chosen_text,
    conflicting,
    data_text,
    head_text,
    noise_text,
    power_text,
    write_page,
)
from dpbench.reproduce.workflow.plan import AUDITED, NO_PRIVACY, PLAIN, folder_of, make_plan
from dpbench.run.search_path import conf_dir


@dataclass(frozen=True)
class Settings:
    """How a workflow is carried out.

    Attributes:
        margin: By how much more training labels than fresh ones may be recalled, as a share.
        noise: Noise multipliers to try, None for seven of equal ratio.
        launcher: Words for Hydra: the launcher and its settings.
        out: Where its results go.
        runs: Where the runs are kept.
        only_status: Run nothing, write nothing.
        replace: Overwrite results of another workflow or of other code.
    """

    margin: float = 0.1
    noise: tuple[float, ...] | None = None
    launcher: tuple[str, ...] = ()
    out: Path = Path("results")
    runs: Path = Path("runs") / "workflow"
    only_status: bool = False
    replace: bool = False


class _Stopped(Exception):
    """The workflow cannot go on; the message says why."""


def run_workflow(words: Sequence[str], settings: Settings, say: Callable[[str], None] = print) -> bool:
    """Carry out what is missing of a workflow, and write what there is.

    Args:
        words: Of a private training, as after `dpbench train`, without its noise.
        settings: How.
        say: Prints a step when it is done.

    Returns:
        Whether it came to its end.

    Raises:
        DPBenchError: The words are of no training that it knows, a launcher is unknown, files are damaged, or a signal
            stopped it; finished runs stay.
    """
    refuse_unknown_choices((*settings.launcher, *words))
    plan = make_plan(words, settings.noise)
    folder = folder_of(plan, settings.out)
    if not (settings.only_status or settings.replace) and (held := conflicting(folder, plan)) is not None:
        raise ConfigurationError(f"{folder} holds {held}: --replace overwrites it, --out writes elsewhere.")
    outcome = Outcome(plan, settings.margin)
    try:
        _carry_out(outcome, settings, say)
    except _Stopped as reason:
        if str(reason):
            say(str(reason))
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigurationError(
            f"no space is left for {settings.runs} or {settings.out}. Finished runs are kept: free some, and call the "
            "same command again."
        ) from error
    finally:
        if outcome.power is not None and not settings.only_status:
            write_page(folder, outcome)
            say(f"written to {folder}")
    return True


def _carry_out(outcome: Outcome, settings: Settings, say: Callable[[str], None]) -> None:
    plan = outcome.plan
    say(head_text(plan))
    table = plan.on_noise()
    alone, private = table.selected([NO_PRIVACY], [], None), table.selected([r.name for r in table.rows[1:]], [], None)
    (job,) = _done(table_jobs(alone, conf_dir(), settings.runs), settings)
    outcome.power = recall_of(job, None)
    assert outcome.power is not None
    say(power_text(plan, outcome.power))
    if outcome.power.recalled <= POWER:
        raise _Stopped("")
    jobs = _done(table_jobs(private, conf_dir(), settings.runs), settings)
    found = [recall_of(job, z) for job, z in zip(jobs, plan.noise, strict=True)]
    outcome.noise = [one for one in found if one is not None]
    outcome.chosen = choose(outcome.noise, outcome.margin)
    say(noise_text(outcome))
    say(chosen_text(outcome))
    if outcome.chosen is None or outcome.chosen.noise_multiplier is None:
        raise _Stopped("")
    _train_on_data(outcome, outcome.chosen.noise_multiplier, settings)
    say(data_text(outcome))


def _train_on_data(outcome: Outcome, z: float, settings: Settings) -> None:
    table = outcome.plan.on_data(z)
    private = [row.name for row in table.rows if row.name != NO_PRIVACY]
    jobs = [
        *table_jobs(table.selected([], [PLAIN], None), conf_dir(), settings.runs),
        *table_jobs(table.selected(private, [AUDITED], None), conf_dir(), settings.runs),
    ]
    _done(jobs, settings)
    audited = {job.row: job for job in jobs if job.column == AUDITED}
    for job in jobs:
        if job.column == PLAIN:
            run = trained(job, audited.get(job.row), None if job.row == NO_PRIVACY else z)
            outcome.data += [] if run is None else [run]


def _done(jobs: Sequence[Job], settings: Settings) -> Sequence[Job]:
    """Run what is missing of some jobs.

    Raises:
        _Stopped: Some are not finished.
    """
    if not settings.only_status:
        sweep(jobs, conf_dir(), settings.launcher)
    if any(job.state() != "done" for job in jobs):
        raise _Stopped(status(jobs))
    return jobs
