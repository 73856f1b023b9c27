"""The workflow: two tables of runs, with rules when to stop: a power check, a calibration on noise, then the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpbench.capabilities.workflow.plan import AUDITED, NO_PRIVACY, make_plan
from dpbench.capabilities.workflow.results import (
    POWER,
    Results,
    data_row,
    noise_row,
    refuse_other_results,
    write_page,
)
from dpbench.harness.reproduce.jobs import Job, status, sweep, table_jobs
from dpbench.harness.reproduce.reproduction import full_disk_explained, refuse_unknown_choices


def run_workflow(
    words: Sequence[str],
    launcher: Sequence[str],
    *,
    noise_multipliers: Sequence[float] | None,
    margin: float,
    out: Path,
    runs: Path,
    only_status: bool,
    replace: bool,
) -> bool:
    """Run what is missing of a workflow, write a page of its results, and print each step.

    Args:
        words: Options of a private training, as for `dpbench train`, without its noise.
        launcher: Options of Hydra: the launcher and its settings.
        noise_multipliers: Noise multipliers to try; None for seven of equal ratio.
        margin: Share by which training labels may be recalled better than fresh ones.
        out: The folder of results.
        runs: The folder of runs.
        only_status: Whether to run and write nothing.
        replace: Whether to overwrite results of another workflow or of other code.

    Returns:
        Whether it came to its end.

    Raises:
        DPBenchError: The options are of no training that it knows, a launcher is unknown, files are damaged, or a
            signal stopped it; finished runs stay.
    """
    refuse_unknown_choices((*launcher, *words))
    plan = make_plan(words, noise_multipliers)
    table = plan.on_noise()
    folder = out / table.folder
    power_job, *private_jobs = table_jobs(table, runs)
    if not (only_status or replace):
        refuse_other_results(folder, [power_job, *private_jobs])
    results = Results(plan, margin)
    _say(results.text("batch"))

    def finish(jobs: Sequence[Job]) -> bool:
        """Run what is missing; returns whether all are done."""
        if not only_status:
            sweep(jobs, launcher)
        is_done = all(job.state() == "done" for job in jobs)
        if not is_done:
            _say(status(jobs))
        return is_done

    def report(*steps: str) -> None:
        _say(results.text(*steps))
        if not only_status:
            write_page(folder, results)
            _say(f"written to {folder}")

    with full_disk_explained(runs, out):
        if not finish([power_job]):
            return False
        results.power = noise_row(power_job, None)
        report("power")
        if results.power["recalled"] <= POWER or not finish(private_jobs):
            return False
        for job, z in zip(private_jobs, plan.noise, strict=True):
            results.noise.append(noise_row(job, z))
        report("noise", "chosen")
        if results.chosen is None:
            return False
        chosen = results.chosen["noise_multiplier"]
        jobs = {(job.row, job.column): job for job in table_jobs(plan.on_data(chosen), runs)}
        jobs.pop((NO_PRIVACY, AUDITED))  # without privacy there is no ε to audit
        if not finish(list(jobs.values())):
            return False
        for (row, column), job in jobs.items():
            if column != AUDITED:
                of_row = None if row == NO_PRIVACY else chosen
                results.data.append(data_row(job, jobs.get((row, AUDITED)), of_row))
        report("data")
    return True


def _say(text: str) -> None:
    print(text, flush=True)
