"""Run what is missing of a table, by a Hydra launcher, with one progress line for the whole."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dpbench.errors import Interrupted
from dpbench.reproduce.jobs import Job, read_jobs, run_job, write_jobs
from dpbench.run.jobs import launch
from dpbench.run.progress import Progress, watching


def sweep(jobs: Sequence[Job], conf: Path, words: Sequence[str]) -> None:
    """Run all jobs that are not finished; failed ones are tried again.

    Args:
        jobs: The runs of a table.
        conf: The configuration's folder.
        words: Such as launcher=joblib, and settings of the launcher.

    Raises:
        ConfigurationError: The launcher is unknown or not installed, or its cluster does not answer.
        Interrupted: A signal stopped the sweep; finished runs stay.
    """
    missing = [job for job in jobs if job.state() != "done"]
    if not missing:
        return
    listing = missing[0].path.parent / f".jobs-{os.getpid()}.json"  # where other machines of a cluster see it
    write_jobs(listing, missing)
    numbers = ",".join(map(str, range(len(missing))))
    queued = False
    try:
        with _watching(jobs), _terminable():
            place = f"hydra.sweep.dir='{listing.parent / '.sweep'}'"
            launch(
                ["-m", f"jobs='{listing}'", f"number={numbers}", place, *words],
                swept_job,
                conf,
                "reproduce",
                checked=False,
            )
    except (KeyboardInterrupt, Interrupted):
        queued = "launcher=submitit" in words  # its jobs go on without us, and look what they are when they begin
        raise
    finally:
        if not queued:
            listing.unlink(missing_ok=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, or the notice of a scheduler, stops the sweep as Ctrl-C does: the run at hand is saved."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number, "the same command")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def swept_job(cfg: DictConfig) -> None:
    """The task of the sweep: one run of the table."""
    launcher = HydraConfig.get().launcher
    workers = int(launcher.get("n_jobs", 1) or 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if workers == 1 else max(1, cores // (workers if workers > 0 else cores))
    run_job(read_jobs(Path(cfg.jobs))[int(cfg.number)], threads)


def _watching(jobs: Sequence[Job]) -> AbstractContextManager[None]:
    """Show how far the runs of a table are."""

    def look() -> Progress:
        states = {job.told: job.state() for job in jobs}
        counts = _counts(Counter(states.values()), len(jobs))
        return Progress(states, counts, sum(job.steps_made() for job in jobs), sum(job.steps for job in jobs))

    return watching(look)


def _counts(states: Counter[Any], total: int) -> str:
    return f"{states['done']}/{total} done, {states['running']} running, {states['failed']} failed"


def status(jobs: Sequence[Job]) -> str:
    """Count the runs of a table by state, with a line for each failed one."""
    states = Counter(job.state() for job in jobs)
    waiting = len(jobs) - states["done"] - states["running"] - states["failed"]
    failures = [f"  failed: {job.failure()}" for job in jobs if job.state() == "failed"]
    return "\n".join([f"{_counts(states, len(jobs))}, {waiting} to do", *failures])
