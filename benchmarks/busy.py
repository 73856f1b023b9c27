"""A run beside other work: `python -m benchmarks busy`.

Steps of the whole harness on mnist_cnn, alone, beside a busy process, and beside another training; with the ways in
which the threads of an operator can wait for each other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Process, start, wait_until_quiet
from benchmarks.rows import Row, origin, read, write
from dpbench.files import write_atomically
from dpbench.reports.markdown import markdown_rows
from dpbench.run.runtime import SPINS

WORKLOAD, METHOD = "mnist_cnn b256", "harness/flat"
WAITING = {  # name: (environment, threads); libgomp's own number of spins is 300,000
    "spinning (PyTorch's default)": ({"GOMP_SPINCOUNT": "300000"}, 2),
    f"spinning briefly (dpbench: {SPINS} turns)": ({"GOMP_SPINCOUNT": SPINS}, 2),
    "not spinning": ({"GOMP_SPINCOUNT": "0"}, 2),
    "one thread": ({"GOMP_SPINCOUNT": SPINS}, 1),
}
BESIDE = ("nothing", "a busy process", "another training")
_STEPS, _WARM = 100, 5  # of a turn: seconds, or the scheduler's slices would be measured


def measure_busy(repeats: int, patience: float, report: Callable[[str], None]) -> list[Row]:
    """Milliseconds a step for each way of waiting beside each kind of work, medians of alternating turns."""
    processes = {name: start(WORKLOAD, METHOD, "cpu", env) for name, (env, _) in WAITING.items()}
    companions = {name: start(WORKLOAD, METHOD, "cpu", env) for name, (env, _) in WAITING.items()}
    quiet, rows = wait_until_quiet(patience), list[Row]()
    for beside in BESIDE:
        times: dict[str, list[float]] = {name: [] for name in WAITING}
        for turn in range(repeats):
            report(f"beside {beside}: turn {turn + 1}")
            for name, process in processes.items():
                with _work(beside, companions[name], WAITING[name][1]):
                    answer = process.ask(steps=_STEPS, warm=_WARM, threads=WAITING[name][1])
                times[name].append(1e3 * answer["wall"] / _STEPS)
        for name, walls in times.items():
            row = {"waiting": name, "beside": beside, "wall_ms": statistics.median(walls), "walls_ms": walls}
            rows.append({**row, "quiet": quiet, **origin()})
    for process in (*processes.values(), *companions.values()):
        process.pipe.kill()
        process.pipe.wait()
    return rows


@contextmanager
def _work(kind: str, companion: Process, threads: int) -> Iterator[None]:
    """Other work, as long as the block lasts."""
    if kind == "a busy process":
        spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            yield
        finally:
            spinning.kill()
            spinning.wait()
    elif kind == "another training":
        over = threading.Event()

        def train() -> None:
            while not over.is_set():
                companion.ask(steps=20, warm=0, threads=threads)

        other = threading.Thread(target=train)
        other.start()
        try:
            yield
        finally:
            over.set()
            other.join()
    else:
        yield


def report_busy(path: Path) -> Path:
    """Write the table beside the rows."""
    rows = read(path)
    walls = {(row["waiting"], row["beside"]): row["wall_ms"] for row in rows}
    alone = walls[next(iter(WAITING)), "nothing"]
    lines = [["ms a step (× PyTorch's default alone)", *(f"beside {beside}" for beside in BESIDE)]]
    for name in WAITING:
        cells = [walls[name, beside] for beside in BESIDE]
        lines.append([name, *(f"{cell:.1f} ({cell / alone:.2f})" for cell in cells)])
    first = rows[0]
    loud = "" if first["quiet"] else " The machine was not quiet when this began."
    text = (
        f"# A run beside other work: {path.stem}\n\n"
        f"Made by `python -m benchmarks busy` at {first['commit']} ({first['date']}), "
        f"{first['hardware']['cpu']}, {first['hardware']['cores']} cores. Steps of the whole harness ({WORKLOAD}), "
        f"medians of alternating turns of {_STEPS} steps.{loud} The other training waits in the same way.\n\n"
        f"{markdown_rows(lines)}\n"
    )
    write_atomically(path.with_suffix(".md"), text)
    return path.with_suffix(".md")


def run_busy(repeats: int, patience: float, path: Path, report: Callable[[str], None]) -> Path:
    """Measure, keep the rows, write the table."""
    write(path, measure_busy(repeats, patience, report))
    return report_busy(path)
