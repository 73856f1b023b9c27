"""The steps: a power check, a calibration on noise, then training on the data, all of it resumable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpbench.errors import ConfigurationError
from dpbench.reproduce.jobs import Job, status, sweep, table_jobs
from dpbench.reproduce.reproduction import full_disk_explained, refuse_unknown_choices
from dpbench.reproduce.tables import Table
from dpbench.workflow.plan import AUDITED, NO_PRIVACY, PLAIN, make_plan
from dpbench.workflow.results import (
    POWER,
    Outcome,
    choose,
    conflicting,
    recall_of,
    steps_text,
    trained,
    write_page,
)


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
    folder = settings.out / plan.on_noise().folder
    if not (settings.only_status or settings.replace) and (other := conflicting(folder, plan)) is not None:
        raise ConfigurationError(f"{folder} holds {other}: --replace overwrites it, --out writes elsewhere.")
    outcome = Outcome(plan, settings.margin)
    with full_disk_explained(settings.runs, settings.out):
        try:
            _carry_out(outcome, settings, say)
        except _Stopped as reason:
            if str(reason):
                say(str(reason))
            return False
        finally:
            # Also of a workflow that was interrupted: what it has found so far is on the page.
            if outcome.power is not None and not settings.only_status:
                write_page(folder, outcome)
                say(f"written to {folder}")
    return True


def _carry_out(outcome: Outcome, settings: Settings, say: Callable[[str], None]) -> None:
    """Run and tell step after step.

    Raises:
        _Stopped: The check cannot see memorization, no noise passes, or runs are not finished.
    """
    plan = outcome.plan
    say(steps_text(outcome, "lot"))
    table = plan.on_noise()
    (job,) = _finished([table.selected([NO_PRIVACY], [], None)], settings)
    outcome.power = recall_of(job, None)
    say(steps_text(outcome, "power"))
    if outcome.power.recalled <= POWER:
        raise _Stopped
    private = [row.name for row in table.rows if row.name != NO_PRIVACY]
    jobs = _finished([table.selected(private, [], None)], settings)
    for job, z in zip(jobs, plan.noise, strict=True):
        outcome.noise.append(recall_of(job, z))
    outcome.chosen = choose(outcome.noise, outcome.margin)
    say(steps_text(outcome, "noise", "chosen"))
    if outcome.chosen is None or outcome.chosen.noise_multiplier is None:
        raise _Stopped
    _train_on_data(outcome, outcome.chosen.noise_multiplier, settings)
    say(steps_text(outcome, "data"))


def _train_on_data(outcome: Outcome, z: float, settings: Settings) -> None:
    table = outcome.plan.on_data(z)
    private = [row.name for row in table.rows if row.name != NO_PRIVACY]
    # Without privacy there is no ε to audit.
    jobs = _finished([table.selected([], [PLAIN], None), table.selected(private, [AUDITED], None)], settings)
    audited = {job.row: job for job in jobs if job.column == AUDITED}
    for job in jobs:
        if job.column == PLAIN:
            noise_multiplier = None if job.row == NO_PRIVACY else z
            outcome.data.append(trained(job, audited.get(job.row), noise_multiplier))


def _finished(tables: Sequence[Table], settings: Settings) -> Sequence[Job]:
    """Run what is missing of some tables.

    Raises:
        _Stopped: Some runs are not finished.
    """
    jobs: list[Job] = []
    for table in tables:
        jobs += table_jobs(table, settings.runs)
    if not settings.only_status:
        sweep(jobs, settings.launcher)
    if any(job.state() != "done" for job in jobs):
        raise _Stopped(status(jobs))
    return jobs
