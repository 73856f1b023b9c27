"""The measuring loop of networks: ways of a step take turns, each in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.machine import wait_until_quiet
from benchmarks.networks import NETWORKS, WAYS
from benchmarks.processes import Worker
from benchmarks.rounds import median_ratio
from benchmarks.rows import Row
from benchmarks.timing import Say, Timed, measure_rounds


def measure(name: str, ways: Sequence[str], turns: int, patience: float, say: Say) -> list[Row]:
    """Measure ways in alternation, on one thread.

    Args:
        name: Of `NETWORKS`.
        ways: Of `WAYS`; the plain one belongs to every measurement.
        turns: Steps of each way, after one that does not count.
        patience: Seconds to wait for a quiet machine.
        say: Told what is being done.

    Returns:
        A row for each way: medians of CPU time, and medians over turns of ratios within a turn.
    """
    timed = []
    for way in (way for way in WAYS if way in {"plain", *ways}):
        say(f"starting {way}")
        worker = Worker(("networks", name, way))
        timed.append(Timed(way, worker, error=worker.facts.get("error"), peak_mb=worker.facts.get("peak_mb")))
    quiet = wait_until_quiet(patience)
    measure_rounds(timed, turns, 1, say, threads=1)
    rows = []
    for entry in timed:
        entry.worker.close()
        cpus = [] if entry.error else entry.cpus
        rows.append(
            {
                "workload": name,
                "method": entry.method,
                "device": "cpu",
                "records": NETWORKS[name].records,
                "turns": len(cpus),
                "cpu_ms": 1e3 * statistics.median(cpus) if cpus else None,
                "cpu_ms_range": [1e3 * min(cpus), 1e3 * max(cpus)] if cpus else None,
                "ratio_to_plain": median_ratio(cpus, timed[0].cpus),
                "peak_mb": entry.peak_mb,
                "quiet": quiet,
                "error": entry.error,
            }
        )
    return rows
