"""Alternating measurement: a process for each method, one of them computing at a time.

Not all methods fit into memory at once, so peers are measured after ours, what has no room after the rest, and every
time against the same reference: what is compared in the end is a method's time relative to the reference's time in the
same minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.growth import workload_named
from benchmarks.methods import REFERENCE, together
from benchmarks.nursery import Forked

_TURN = 0.25  # seconds that a method computes before it is the next one's turn
_BUSY = 0.10  # of a core
_ROOM_MB, _GROWTH = 2000.0, 3.0  # free memory before two more start: this, and so many times what a first step took
_SLOW, _PATIENCE = 1.0, 6.0  # seconds: of a step that needs no warming, and for all turns of a method that is slow


@dataclass
class Process:
    """A worker and what was measured of it."""

    method: str
    pipe: subprocess.Popen[str] | Forked
    peak_mb: float | None = None
    error: str | None = None
    guess: float = 1.0  # seconds of a step, before any was measured
    batch: int = 0  # records of a step
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send an order, wait for the answer; an error ends the method."""
        assert self.pipe.stdin and self.pipe.stdout
        answer: dict[str, Any] = {}
        try:
            if order:
                self.pipe.stdin.write(json.dumps(order) + "\n")
                self.pipe.stdin.flush()
            answer = json.loads(self.pipe.stdout.readline() or "{}")
        except (ConnectionError, json.JSONDecodeError):
            pass
        if not answer or "error" in answer:
            self.error = answer.get("error") or f"the process ended ({self.pipe.poll()})"
        return answer

    def turn(self, threads: int, cpu: bool) -> None:
        """Steps for about a quarter of a second; the median of such turns is what counts."""
        known = self.cpus if cpu else self.walls
        if sum(known) > _PATIENCE:  # seconds of single steps: only where one takes seconds
            return
        likely = min([*known, *self.walls], default=self.guess)
        steps = max(1, round(_TURN / likely))
        answer = self.ask(steps=steps, warm=int(likely < _SLOW) * (2 if steps > 10 else 1), threads=threads)
        if self.error is None:
            records = answer.get("records")  # where lots differ in size: time is taken in proportion
            lots = records / self.batch if records and self.batch else steps
            known.append(answer["cpu" if cpu else "wall"] / lots)


def start(workload: str, method: str, device: str, env: Mapping[str, str] | None = None) -> Process:
    """Start a worker and wait until it has made its first steps; with another environment it is no fork."""
    pipe: subprocess.Popen[str] | Forked
    if env is None:
        pipe = Forked(workload, method, device)
    else:
        command = [sys.executable, "-m", "benchmarks.worker", workload, method, device]
        log = open(os.devnull, "w")  # noqa: SIM115 (the process keeps it)
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        pipe = subprocess.Popen(command, env={**os.environ, **env}, **pipes)
    process = Process(method, pipe, batch=workload_named(workload).batch)
    process.peak_mb = process.ask().get("peak_mb")
    return process


def busy(seconds: float = 0.5) -> float:
    """Cores that the machine used meanwhile, from /proc/stat; 0 where that cannot be read."""
    try:
        before = _used()
        time.sleep(seconds)
        return (_used() - before) / os.sysconf("SC_CLK_TCK") / seconds
    except OSError:
        return 0.0


def _used() -> int:
    user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + soft + steal


def wait_until_quiet(patience: float) -> bool:
    """Whether nobody else computes, waiting for it for so many seconds."""
    end = time.monotonic() + patience
    while busy() > _BUSY:
        if time.monotonic() > end:
            return False
    return True


def measure(
    workload: str,
    methods: Sequence[str],
    device: str,
    threads: int,
    repeats: tuple[int, int],
    patience: float,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measure methods against each other.

    Args:
        workload: Name of the workload.
        methods: Names of the methods.
        device: "cpu" or "cuda".
        threads: Of the wall time; CPU time is taken on one.
        repeats: Turns for wall time and for CPU time.
        patience: Seconds to wait for a quiet machine.
        report: Told what is being done.

    Returns:
        A row for each method: medians in milliseconds a step, and those of the reference beside it.
    """
    rows: list[dict[str, Any]] = []
    for group in together(list(methods)):
        left = list(group)
        while left:
            report("starting")
            processes = _started(workload, [REFERENCE, *(name for name in left if name != REFERENCE)], device)
            new = _alternate(workload, processes, device, threads, repeats, patience, report)
            for row in new:
                row["reference_wall_ms"], row["reference_cpu_ms"] = new[0]["wall_ms"], new[0]["cpu_ms"]
            rows += [row for row in new if row["method"] in left]
            left = [name for name in left if name not in {row["method"] for row in new}]
    return rows


def _started(workload: str, methods: Sequence[str], device: str) -> list[Process]:
    """Workers of the first of these methods, as many as fit into memory: at least two."""
    processes: list[Process] = []
    with ThreadPoolExecutor(2) as pool:
        for first in range(0, len(methods), 2):
            most = max((process.peak_mb or 0.0 for process in processes), default=0.0)
            if processes and _free_mb() < _ROOM_MB + _GROWTH * most:
                break
            processes += pool.map(lambda method: start(workload, method, device), methods[first : first + 2])
    return processes


def _free_mb() -> float:
    """Memory that processes may still take; infinite where that cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1024
    except (OSError, StopIteration):
        return float("inf")


def _alternate(
    workload: str,
    processes: Sequence[Process],
    device: str,
    threads: int,
    repeats: tuple[int, int],
    patience: float,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    quiet = wait_until_quiet(patience)
    for process in processes:  # a turn that does not count, unless it takes seconds
        if process.error is None:
            process.turn(threads, cpu=False)
            process.guess = min(process.walls, default=1.0)
        if process.guess < _SLOW:
            process.walls.clear()
    for number in range(sum(repeats)):
        cpu = number >= repeats[0]
        if cpu and device == "cuda":
            break
        report(f"turn {number + 1}")
        for process in processes:
            if process.error is None:
                process.turn(1 if cpu else threads, cpu)
    for process in processes:
        process.pipe.kill()
        process.pipe.wait()
    return [_row(workload, process, device, threads, quiet) for process in processes]


def _row(workload: str, process: Process, device: str, threads: int, quiet: bool) -> dict[str, Any]:
    walls, cpus = ([1e3 * seconds for seconds in times] for times in (process.walls, process.cpus))
    failed = process.error is not None or not walls
    return {
        "workload": workload,
        "method": process.method,
        "device": device,
        "threads": threads if device == "cpu" else None,
        "wall_ms": None if failed else statistics.median(walls),
        "wall_ms_range": None if failed else [min(walls), max(walls)],
        "cpu_ms": None if failed or not cpus else statistics.median(cpus),
        "peak_mb": None if failed else process.peak_mb,
        "quiet": quiet,
        "error": process.error,
    }
