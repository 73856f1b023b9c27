"""Rounds of users: every method makes one in each turn, and only one of them computes at a time.

Our round, the limit and a first version take turns in one process. pfl-research and Flower ask for other versions of
what dpbench is pinned to, so they live in an environment of their own with the same PyTorch, a process each.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.machine import wait_until_quiet
from benchmarks.methods import MALLOC
from benchmarks.processes import Worker
from benchmarks.rows import Row
from benchmarks.timing import Say, Timed, measure_rounds
from benchmarks.users.tasks import TASKS

ROOT = Path(__file__).parents[1]
LIMIT = "limit"
NAIVE = "naive"
OURS = "ours"
PFL = f"pfl {MALLOC}"
EVALUATED = f"pfl, users evaluated, {MALLOC}"
FLOWER = f"flower {MALLOC}"
PRIVATE = f"flower, private, {MALLOC}"
_KEEP_BLOCKS = {  # as `allocator.keep_large_blocks`
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}


@dataclass(frozen=True)
class Crew:
    """Methods that share a process.

    Attributes:
        family: "own", "pfl" or "flower": what the worker runs, "own" in this environment.
        kind: A word for it.
        methods: Names.
        default_malloc: Whether the C library's allocator is left as it comes.
    """

    family: str
    kind: str
    methods: tuple[str, ...]
    default_malloc: bool = True


CREWS = (
    Crew("own", "", (LIMIT, NAIVE, OURS), default_malloc=False),
    Crew("own", "", (f"{NAIVE} {MALLOC}", f"{OURS} {MALLOC}")),
    Crew("pfl", "", (PFL,)),
    Crew("pfl", "", ("pfl",), default_malloc=False),
    Crew("pfl", "evaluated", (EVALUATED,)),
    Crew("flower", "", (FLOWER,)),
    Crew("flower", "private", (PRIVATE,)),
)
METHODS = tuple(method for crew in CREWS for method in crew.methods)


def measure(
    task: str,
    users: int,
    turns: int,
    methods: Sequence[str],
    peers: Path,
    patience: float,
    say: Say,
) -> list[Row]:
    """Measure methods against each other.

    Args:
        task: Name of the task.
        users: In a round.
        turns: Rounds of each method, after one that does not count.
        methods: Names; the limit and ours belong to every measurement.
        peers: Folder of the environment with pfl and flwr.
        patience: Seconds to wait for a quiet machine.
        say: Told what is being done.

    Returns:
        A row for each method: medians in seconds a round, and medians over turns of ratios within a turn.
    """
    timed: list[Timed] = []
    workers: list[Worker] = []
    missing: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        say("starting")
        try:
            for crew in CREWS:
                chosen = [method for method in crew.methods if method in {*methods, LIMIT, OURS}]
                python = Path(sys.executable) if crew.family == "own" else peers.absolute() / "bin" / "python"
                if not python.exists():
                    missing |= dict.fromkeys(chosen, f"not installed: `make bench-users` installs it into {peers}")
                elif chosen:
                    words = ("users", crew.family, crew.kind, task, str(users), *crew.methods)
                    workers.append(Worker(words, _environment(crew, folder), python))
                    failure = workers[-1].facts.get("error")
                    timed += [Timed(method, workers[-1], error=failure) for method in chosen]
            quiet = wait_until_quiet(patience)
            # The first round of each meets operators for the first time, and does not count.
            measure_rounds(timed, turns, 1, say)
        finally:
            for worker in workers:
                worker.close()
    by_method = {entry.method: entry for entry in timed}
    rows = []
    for method in METHODS:
        if method in by_method or method in missing:
            rows.append(row_of(task, users, method, by_method, missing.get(method), quiet))
    return rows


def _environment(crew: Crew, folder: str) -> dict[str, str]:
    """Variables of a process that computes on one core and finds dpbench's own code."""
    # The environment of the peers has dpbench's packages, but not dpbench itself.
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "RAY_TMPDIR": folder,
    }
    return environment if crew.default_malloc else environment | _KEEP_BLOCKS


def row_of(task: str, users: int, method: str, timed: Mapping[str, Timed], missing: str | None, quiet: bool) -> Row:
    """Row of a method, with the ratios of its turns to those of the limit and of ours.

    Args:
        task: Name of the task.
        users: In a round.
        method: Name of the method.
        timed: What was measured of each.
        missing: Why the method could not be started.
        quiet: Whether the machine was.
    """
    entry = timed.get(method)
    cpus = entry.cpus if entry else []
    facts = entry.worker.facts if entry else {}
    return {
        "workload": task,
        "method": method,
        "device": "cpu",
        "users": users,
        "turns": len(cpus),
        "cpu_s": statistics.median(cpus) if cpus else None,
        "cpu_s_range": [min(cpus), max(cpus)] if cpus else None,
        "wall_s": statistics.median(entry.walls) if entry and entry.walls else None,
        "ratio_to_limit": median_ratio(cpus, timed[LIMIT].cpus),
        "ratio_to_ours": median_ratio(cpus, timed[OURS].cpus),
        "asked_of_limit": TASKS[task].asked if method == OURS else None,
        "limit": facts.get("limit") if method == LIMIT else None,
        "peer": facts.get("peer"),
        "quiet": quiet,
        "error": entry.error if entry else missing,
    }


def median_ratio(cpus: Sequence[float], others: Sequence[float]) -> float | None:
    """Median over turns of the ratio within each.

    Args:
        cpus: Times of a method, one of each turn.
        others: Of another in the same turns.
    """
    if not cpus or len(cpus) != len(others):
        return None
    # Of ratios, not a ratio of medians: within a turn the machine is the same for both.
    return statistics.median(cpu / other for cpu, other in zip(cpus, others, strict=True))
