"""Run what is missing of a table, by a Hydra launcher, with one progress line for the whole."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tqdm import tqdm

from dpbench.errors import ConfigurationError, Interrupted
from dpbench.reproduce.jobs import Job, State, read_jobs, run_job, write_jobs
from dpbench.training.launch import launch

_REFRESH = 1.0  # seconds


def sweep(jobs: Sequence[Job], conf: Path, words: Sequence[str]) -> None:
    """Run all jobs that are not finished; failed ones are tried again.

    Args:
        jobs: The runs of a table.
        conf: The configuration's folder.
        words: Such as launcher=joblib, and settings of the launcher.

    Raises:
        ConfigurationError: The launcher is unknown or not installed.
        Interrupted: A signal stopped the sweep; finished runs stay.
    """
    missing = [job for job in jobs if job.state() != "done"]
    if not missing:
        return
    listing = missing[0].path.parent / f".jobs-{os.getpid()}.json"  # where other machines of a cluster see it
    write_jobs(listing, missing)
    numbers = ",".join(map(str, range(len(missing))))
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
    except RuntimeError as error:
        if "srun" not in str(error):
            raise
        raise ConfigurationError("launcher=submitit needs Slurm (srun): here, take launcher=submitit_local.") from error
    finally:
        listing.unlink(missing_ok=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM stops the sweep as Ctrl-C does: the run at hand is saved."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number, "the same command")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def swept_job(cfg: DictConfig) -> None:
    """The task of the sweep: one run of the table."""
    launcher = HydraConfig.get().launcher
    workers = int(launcher.get("n_jobs", 1) or 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if workers == 1 else max(1, cores // (workers if workers > 0 else cores))
    run_job(read_jobs(Path(cfg.jobs))[int(cfg.number)], threads)


@contextmanager
def _watching(jobs: Sequence[Job]) -> Iterator[None]:
    """A bar over the steps of all runs; where nobody is there to see it, a line for each run that ends."""
    begun = sum(job.steps_made() for job in jobs)
    shape = "{desc} {bar:20} {percentage:3.0f}% [{elapsed}, left {remaining}]"
    bar = tqdm(total=sum(job.steps for job in jobs), initial=begun, bar_format=shape, disable=None)
    reported = {job.folder: job.state() for job in jobs}
    stop = threading.Event()

    def show() -> None:
        states = {job.folder: job.state() for job in jobs}
        counts = _counts(Counter(states.values()), len(jobs))
        if bar.disable:
            _report_changes(jobs, reported, states, counts)
        else:
            bar.set_description_str(counts, refresh=False)
            bar.update(sum(job.steps_made() for job in jobs) - bar.n)
            bar.refresh()

    def watch() -> None:
        while not stop.wait(_REFRESH):
            show()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        show()
        bar.close()


def _report_changes(jobs: Sequence[Job], reported: dict[str, State], states: dict[str, State], counts: str) -> None:
    for job in jobs:
        state = states[job.folder]
        if state in ("done", "failed") and state != reported[job.folder]:
            print(f"{counts}: {job.told} is {state}", file=sys.stderr, flush=True)
        reported[job.folder] = state


def _counts(states: Counter[Any], total: int) -> str:
    return f"{states['done']}/{total} done, {states['running']} running, {states['failed']} failed"


def status(jobs: Sequence[Job]) -> str:
    """Count the runs of a table by state, with a line for each failed one."""
    states = Counter(job.state() for job in jobs)
    waiting = len(jobs) - states["done"] - states["running"] - states["failed"]
    failures = [f"  failed: {job.failure()}" for job in jobs if job.state() == "failed"]
    return "\n".join([f"{_counts(states, len(jobs))}, {waiting} to do", *failures])
