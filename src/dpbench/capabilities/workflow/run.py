"""The workflow: two tables of runs, with rules when to stop: a power check, a calibration on noise, then the data."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from dpbench.capabilities.auditing.label_scores import label_scores
from dpbench.capabilities.auditing.levels import check_level
from dpbench.capabilities.auditing.report import audit_by_labels, audit_run
from dpbench.capabilities.workflow.plan import AUDITED, NO_PRIVACY, Plan, make_plan
from dpbench.files import write_atomically
from dpbench.harness.reproduce.jobs import Job, require_launcher, status, sweep, table_jobs
from dpbench.harness.reproduce.reproduction import full_disk_explained
from dpbench.harness.runs.numbers import ABSENT
from dpbench.templates import render

POWER = 0.9
"""Share of the random labels that training without privacy has to recall: else the check could not see memorization."""
CONFIDENCE = 0.95
Row = Mapping[str, Any]
"""One line of noise.csv or data.csv."""


def run_workflow(
    words: Sequence[str],
    launcher: Sequence[str],
    *,
    noise_multipliers: Sequence[float] | None,
    margin: float,
    out: Path,
    runs: Path,
    only_status: bool,
) -> bool:
    """Run the missing parts of a workflow, write a page of its results, and print each step.

    Args:
        words: Options of a private training, as for `dpbench train`, without its noise.
        launcher: Options of Hydra: the launcher and its settings.
        noise_multipliers: Noise multipliers to try; None for seven of equal ratio.
        margin: Share by which training labels may be recalled better than fresh ones.
        out: The folder of results.
        runs: The folder of runs.
        only_status: True to run and write nothing.

    Returns:
        Whether it came to its end.

    Raises:
        DPBenchError: The options are of no training that it knows, a launcher is unknown, files are damaged, or a
            signal stopped it; finished runs stay.
    """
    require_launcher(launcher)
    plan = make_plan(words, noise_multipliers)
    table = plan.on_noise()
    power_job, *private_jobs = table_jobs(table, runs)
    noise: list[Row] = []
    data: list[Row] = []

    def finish(jobs: Sequence[Job]) -> bool:
        """Run the missing jobs, and return whether all are done."""
        if not only_status:
            sweep(jobs, launcher)
        is_done = all(job.state() == "done" for job in jobs)
        if not is_done:
            print(status(jobs), flush=True)
        return is_done

    def report() -> None:
        text = page(plan, margin, noise, data)
        print(text, flush=True)
        if not only_status:
            write_page(out / table.folder, text, noise, data)

    with full_disk_explained(runs, out):
        if not finish([power_job]):
            return False
        noise.append(noise_row(power_job, None))
        if noise[0]["recalled"] <= POWER or not finish(private_jobs):
            report()
            return False
        noise += [noise_row(job, z) for job, z in zip(private_jobs, plan.noise, strict=True)]
        report()
        z = chosen(noise, margin)
        if z is None:
            return False
        jobs = {(job.row, job.column): job for job in table_jobs(plan.on_data(z), runs)}
        jobs.pop((NO_PRIVACY, AUDITED))  # without privacy there is no ε to audit
        if not finish(list(jobs.values())):
            return False
        for (row, column), job in jobs.items():
            if column != AUDITED:
                data.append(data_row(job, jobs.get((row, AUDITED)), None if row == NO_PRIVACY else z))
        report()
    return True


def upper_limit(recalled: float, records: int, guessed: float, others: int, confidence: float = CONFIDENCE) -> float:
    """Upper one-sided limit of the difference of two shares of independent records (normal approximation).

    Args:
        recalled: Share of the training records.
        records: Number of training records.
        guessed: Share of the other records.
        others: Number of other records.
        confidence: Probability that the limit is high enough.

    Raises:
        ConfigurationError: The confidence is out of range.

    >>> round(upper_limit(0.167, 2000, 0.10, 2000), 3)
    0.085
    """
    check_level(confidence, "confidence")
    variance = recalled * (1 - recalled) / records + guessed * (1 - guessed) / others
    return recalled - guessed + float(stats.norm.ppf(confidence)) * math.sqrt(variance)


def noise_row(job: Job, noise_multiplier: float | None) -> Row:
    """Measure how many random labels a finished run on noise recalls.

    Args:
        job: The run.
        noise_multiplier: z; None without privacy, where there is no ε to refute.

    Raises:
        DPBenchError: Its files are damaged.
    """
    record = job.result()
    assert record is not None
    scores = label_scores(job.run)
    audit = None if noise_multiplier is None else audit_by_labels(job.run, scores, CONFIDENCE).result
    return {
        "noise_multiplier": noise_multiplier,
        "epsilon_rdp": record["privacy"]["epsilon"].get("rdp"),
        "epsilon_pld": record["privacy"]["epsilon"].get("pld"),
        "recalled": scores.recalled,
        "guessed": scores.guessed,
        "limit": upper_limit(scores.recalled, len(scores.members), scores.guessed, len(scores.others)),
        "audited": audit and audit.audited,
        "verdict": audit and str(audit.verdict),
        "seconds": record["seconds"],
        "words": " ".join(job.words),
        "code_hash": job.code_hash,
    }


def data_row(job: Job, audited: Job | None, noise_multiplier: float | None) -> Row:
    """Read a finished run on the data.

    Args:
        job: The run.
        audited: The same training with canaries; None without privacy.
        noise_multiplier: z; None without privacy.

    Raises:
        DPBenchError: Files are damaged.
    """
    record = job.result()
    assert record is not None
    audit = None if audited is None else audit_run(audited.path, CONFIDENCE).result
    epsilon = record["privacy"]["epsilon"]
    return {
        "strategy": job.row,
        "noise_multiplier": noise_multiplier,
        "accuracy": record["metrics"].get("test/accuracy"),
        "claimed": epsilon.get("rdp"),
        "sound": epsilon.get("pld") or epsilon.get("rdp"),
        "audited": audit and audit.audited,
        "audited_sound": audit and audit.sound,  # of a run with more records
        "verdict": audit and str(audit.verdict),
        "seconds": record["seconds"],
        "words": " ".join(job.words),
        "code_hash": job.code_hash,
    }


def chosen(noise: Sequence[Row], margin: float) -> float | None:
    """The least noise multiplier that passes, as all larger ones do; None if the largest does not.

    Args:
        noise: The run without privacy, then the private runs on noise by increasing noise.
        margin: Share by which training labels may be recalled better than fresh ones.
    """
    multiplier = None
    for run in reversed(noise[1:]):
        # A run of less noise that passes beside one that does not has passed by chance.
        if run["limit"] >= margin:
            break
        multiplier = run["noise_multiplier"]
    return multiplier


def page(plan: Plan, margin: float, noise: Sequence[Row], data: Sequence[Row]) -> str:
    """The results so far in Markdown.

    Args:
        plan: The runs.
        margin: Share by which training labels may be recalled better than fresh ones.
        noise: The run without privacy, then the private runs on noise by increasing noise.
        data: The runs on the data.
    """
    multipliers = ",".join(f"{z:g}" for z in plan.noise)
    options = f"seed={plan.seed} --margin {100 * margin:g} --noise-multipliers {multipliers}"
    return render(
        Path(__file__).with_name("page.md.jinja"),
        plan=plan,
        command=f"dpbench workflow {shlex.join(plan.words)} {options}",
        margin=margin,
        power=POWER,
        noise=noise,
        chosen=chosen(noise, margin),
        data=data,
        number=_number,
    )


def _number(value: float | None) -> str:
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.2f}"


def write_page(folder: Path, text: str, noise: Sequence[Row], data: Sequence[Row]) -> None:
    """Write noise.csv, data.csv and README.md into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("noise.csv", noise), ("data.csv", data)):
        if rows:
            write_atomically(folder / name, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    write_atomically(folder / "README.md", text)
