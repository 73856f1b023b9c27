"""The measuring loop: methods take turns, one of them computing at a time.

Not all methods fit into memory at once, so peers are measured after ours, what has no room after the rest, and every
time against the same reference: what is compared in the end is a method's time relative to the reference's time in the
same minutes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.machine import free_mb, wait_until_quiet
from benchmarks.methods import REFERENCE, together
from benchmarks.processes import Worker
from benchmarks.rows import Row
from benchmarks.workloads import GPU_WORKLOADS

_TURN = {"cpu": 0.25, "cuda": 0.2}  # seconds that a method computes before it is the next one's turn
_ROOM_MB = 2000.0  # free memory before another process starts: this,
_GROWTH = 3.0  # and so many times what a first step took
_SLOW = 1.0  # seconds of a step that needs no warming
_ENOUGH = 6.0  # seconds of single steps, after which a slow method has no more turns
_WARM_OF_MANY = 2  # steps that do not count, in a turn of more than ten
Say = Callable[[str], None]


@dataclass
class Timed:
    """A method, the process that makes its steps, and what was measured.

    Attributes:
        method: Name of the method.
        worker: Its process, which other methods may share.
        batch: Records in a lot on average: where lots differ in size, time is taken in proportion.
        error: Why it is measured no more.
        peak_mb: Memory of the first steps.
        walls: Seconds of a step, in each turn.
        cpus: CPU seconds of a step, in each turn that counted them.
    """

    method: str
    worker: Worker
    batch: int | None = None
    error: str | None = None
    peak_mb: float | None = None
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    def turn(self, steps: int = 1, warm: int = 0, threads: int | None = None) -> tuple[float, float] | None:
        """Make steps and measure them, unless the method has failed.

        Args:
            steps: That count.
            warm: That do not, before them.
            threads: Of an operator; None: as they are.

        Returns:
            Wall and CPU seconds of a step.
        """
        self.error = self.error or self.worker.error
        if self.error is not None:
            return None
        answer = self.worker.ask(method=self.method, steps=steps, warm=warm, threads=threads)
        if "error" in answer:
            self.error = answer["error"]
            return None
        records = answer["records"]
        lots = records / self.batch if records and self.batch else steps
        return answer["wall"] / lots, answer["cpu"] / lots


def measure_steps(
    workload: str,
    methods: Sequence[str],
    device: str,
    threads: int,
    repeats: tuple[int, int],
    patience: float,
    say: Say,
) -> list[Row]:
    """Measure steps of methods against each other.

    Args:
        workload: Name of the workload.
        methods: Names of the methods.
        device: "cpu" or "cuda".
        threads: Of the wall time; CPU time is taken on one.
        repeats: Turns for wall time and for CPU time.
        patience: Seconds to wait for a quiet machine.
        say: Told what is being done.

    Returns:
        A row for each method: medians in milliseconds a step, and those of the reference beside it.
    """
    rows: list[Row] = []
    for group in together(methods):
        remaining = list(group)
        while remaining:
            say("starting")
            chosen = [REFERENCE, *(method for method in remaining if method != REFERENCE)]
            timed = _start(workload, chosen, device)
            quiet = wait_until_quiet(patience)
            _alternate(timed, device, threads, repeats, say)
            new = []
            for entry in timed:
                entry.worker.close()
                new.append(_row(workload, entry, device, threads, quiet))
            for row in new:
                row["reference_wall_ms"] = new[0]["wall_ms"]
                row["reference_cpu_ms"] = new[0]["cpu_ms"]
                if row["method"] in remaining:
                    remaining.remove(row["method"])
                    rows.append(row)
    return rows


def _start(workload: str, methods: Sequence[str], device: str) -> list[Timed]:
    """Start workers of the first of these methods, as many as fit into memory: at least two."""
    timed: list[Timed] = []
    for method in methods:
        most = max((entry.peak_mb or 0.0 for entry in timed), default=0.0)
        # A machine that swaps measures its disk.
        if len(timed) > 1 and free_mb() < _ROOM_MB + _GROWTH * most:
            break
        worker = Worker(("steps", workload, device, method))
        facts = worker.facts
        timed.append(Timed(method, worker, GPU_WORKLOADS[workload].batch, facts.get("error"), facts.get("peak_mb")))
    return timed


def _alternate(timed: Sequence[Timed], device: str, threads: int, repeats: tuple[int, int], say: Say) -> None:
    """Let methods take turns, of as many steps as fit into a turn: first for wall time, then for CPU time."""
    first = {entry.method: entry.turn(threads=threads) or (1.0, 1.0) for entry in timed}
    for number in range(sum(repeats)):
        counts_cpu = number >= repeats[0]
        if counts_cpu and device == "cuda":
            break
        say(f"turn {number + 1}")
        for entry in timed:
            series = entry.cpus if counts_cpu else entry.walls
            if sum(series) > _ENOUGH:
                continue
            likely = min([*series, *entry.walls], default=first[entry.method][0])
            steps = max(1, round(_TURN[device] / likely))
            warm = _WARM_OF_MANY if steps > 10 else 1
            if likely >= _SLOW:
                warm = 0
            measured = entry.turn(steps, warm, 1 if counts_cpu else threads)
            if measured is not None:
                series.append(measured[1] if counts_cpu else measured[0])


def _row(workload: str, entry: Timed, device: str, threads: int, quiet: bool) -> Row:
    walls = [] if entry.error else [1e3 * seconds for seconds in entry.walls]
    cpus = [] if entry.error else [1e3 * seconds for seconds in entry.cpus]
    return {
        "workload": workload,
        "method": entry.method,
        "device": device,
        "threads": threads if device == "cpu" else None,
        "wall_ms": statistics.median(walls) if walls else None,
        "wall_ms_range": [min(walls), max(walls)] if walls else None,
        "cpu_ms": statistics.median(cpus) if cpus else None,
        "peak_mb": entry.peak_mb if walls else None,
        "quiet": quiet,
        "error": entry.error,
    }


def measure_rounds(timed: Sequence[Timed], turns: int, skipped: int, say: Say, **order: Any) -> None:
    """Let methods take turns of a fixed number of steps.

    Args:
        timed: The methods; their times are added to what they hold.
        turns: That count.
        skipped: Turns before them, which do not.
        say: Told what is being done.
        **order: What each turn is (`Timed.turn`).
    """
    for turn in range(skipped + turns):
        say(f"turn {turn + 1} of {skipped + turns}")
        for entry in timed:
            measured = entry.turn(**order)
            if measured is not None and turn >= skipped:
                entry.walls.append(measured[0])
                entry.cpus.append(measured[1])
