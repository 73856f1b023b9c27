"""Alternating rounds: every method makes one in each turn, and only one of them computes at a time.

Our round, the limit and a first version take turns in one process. pfl-research and Flower ask for other versions of
what dpbench is pinned to, so they live in an environment of their own with the same PyTorch, a process each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Process, wait_until_quiet
from benchmarks.methods import MALLOC
from benchmarks.rows import Row
from benchmarks.users.tasks import TASKS

ROOT = Path(__file__).parents[2]
LIMIT, NAIVE, OURS = "limit", "naive", "ours"
PFL, EVALUATED = f"pfl {MALLOC}", f"pfl, users evaluated, {MALLOC}"
FLOWER, PRIVATE = f"flower {MALLOC}", f"flower, private, {MALLOC}"
_KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}  # as `allocator.keep_large_blocks`
_PATIENCE = 30.0  # seconds for a process to end


@dataclass(frozen=True)
class Crew:
    """Methods that share a process.

    Attributes:
        family: "own", "pfl" or "flower": what the worker runs, "own" in this environment.
        kind: A word for it.
        methods: Names.
        defaults: Whether the C library's allocator is left as it comes.
    """

    family: str
    kind: str
    methods: tuple[str, ...]
    defaults: bool = True


CREWS = (
    Crew("own", "limit", (LIMIT, NAIVE, OURS), defaults=False),
    Crew("own", "", (f"{NAIVE} {MALLOC}", f"{OURS} {MALLOC}")),
    Crew("pfl", "", (PFL,)),
    Crew("pfl", "", ("pfl",), defaults=False),
    Crew("pfl", "evaluated", (EVALUATED,)),
    Crew("flower", "", (FLOWER,)),
    Crew("flower", "private", (PRIVATE,)),
)
METHODS = tuple(method for crew in CREWS for method in crew.methods)


@dataclass
class _Worker:
    """A process, if it could be started, and what it said of itself."""

    process: Process | None
    facts: dict[str, Any]

    @property
    def error(self) -> str | None:
        """Why it measures nothing."""
        error: str | None = self.facts.get("error") if self.process is None else self.process.error
        return error


@dataclass
class Measured:
    """What was measured of a method: seconds of each turn."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def measure(
    task: str,
    users: int,
    turns: int,
    methods: Sequence[str],
    peers: Path,
    patience: float,
    report: Callable[[str], None],
) -> list[Row]:
    """Measure methods against each other.

    Args:
        task: Name of the task.
        users: In a round.
        turns: Rounds of each method, after one that does not count.
        methods: Names; the limit and ours belong to every measurement.
        peers: Folder of the environment with pfl and flwr.
        patience: Seconds to wait for a quiet machine.
        report: Told what is being done.

    Returns:
        A row for each method: medians in seconds a round, and medians over turns of ratios within a turn.
    """
    wanted = [method for method in METHODS if method in {*methods, LIMIT, OURS}]
    crews = [crew for crew in CREWS if set(crew.methods) & set(wanted)]
    results = {method: Measured() for method in wanted}
    with TemporaryDirectory() as folder:
        report("starting")
        workers = [_start(crew, task, users, peers, folder) for crew in crews]
        try:
            quiet = wait_until_quiet(patience)
            for turn in range(turns + 1):
                report(f"turn {turn} of {turns}")
                for crew, worker in zip(crews, workers, strict=True):
                    for method in crew.methods:
                        if method in results:
                            _turn(worker, method, results[method], counts=turn > 0)
        finally:
            for worker in workers:
                _end(worker)
    return [_row(task, users, method, results, quiet) for method in wanted]


def _start(crew: Crew, task: str, users: int, peers: Path, folder: str) -> _Worker:
    """A process that has made what it needs, or why there is none."""
    python = Path(sys.executable) if crew.family == "own" else peers.absolute() / "bin" / "python"
    if not python.exists():
        return _Worker(None, {"error": f"not installed: `make bench-users` installs it into {peers}"})
    command = [str(python), "-m", "benchmarks.users.worker", crew.family, crew.kind, task, str(users)]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_TMPDIR": folder}
    env |= {} if crew.defaults else _KEEP
    pipe = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
        cwd=ROOT,
    )
    process = Process(crew.methods[0], pipe)
    return _Worker(process, process.ask())


def _turn(worker: _Worker, method: str, measured: Measured, counts: bool) -> None:
    answer = worker.facts if worker.process is None or worker.process.error else worker.process.ask(method=method)
    measured.facts, measured.error = worker.facts, measured.error or worker.error
    if counts and measured.error is None:
        measured.cpu.append(answer["cpu"])
        measured.wall.append(answer["wall"])


def _end(worker: _Worker) -> None:
    """Let it end by itself, so that Ray's processes end with it."""
    if worker.process is None:
        return
    pipe = worker.process.pipe
    assert pipe.stdin is not None and pipe.stdout is not None
    pipe.stdin.close()
    try:
        pipe.wait(_PATIENCE)
    except subprocess.TimeoutExpired:  # in the middle of a round
        pipe.kill()
        pipe.wait()
    pipe.stdout.close()


def _row(task: str, users: int, method: str, results: Mapping[str, Measured], quiet: bool) -> Row:
    measured, ours, limit = (results[name] for name in (method, OURS, LIMIT))
    cpu = measured.cpu
    return {
        "workload": task,
        "method": method,
        "device": "cpu",
        "users": users,
        "turns": len(cpu),
        "cpu_s": statistics.median(cpu) if cpu else None,
        "cpu_s_range": [min(cpu), max(cpu)] if cpu else None,
        "wall_s": statistics.median(measured.wall) if cpu else None,
        "ratio_to_limit": _median_ratio(cpu, limit.cpu),
        "ratio_to_ours": _median_ratio(cpu, ours.cpu),
        "asked_of_limit": TASKS[task].asked if method == OURS else None,
        "limit": measured.facts.get("limit") if method == LIMIT else None,
        "peer": measured.facts.get("peer"),
        "quiet": quiet,
        "error": measured.error,
    }


def _median_ratio(cpu: Sequence[float], of: Sequence[float]) -> float | None:
    """Median over turns of the ratio within each."""
    return statistics.median(a / b for a, b in zip(cpu, of, strict=True)) if cpu and len(cpu) == len(of) else None
