"""A run beside other work: `python -m benchmarks busy`.

Steps of the whole harness on mnist_cnn, alone, beside a busy process, and beside another training; with the ways in
which the threads of an operator can wait for each other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.machine import wait_until_quiet
from benchmarks.processes import Worker
from benchmarks.rows import Row, origin
from benchmarks.timing import Say, Timed
from dpbench.run.runtime import SPINS

WORKLOAD = "mnist_cnn b256"
_METHOD = "harness/flat"
_WAITING = {  # name: (GOMP_SPINCOUNT, threads); libgomp's own number of spins is 300,000
    "spinning (PyTorch's default)": ("300000", 2),
    f"spinning briefly (dpbench: {SPINS} turns)": (SPINS, 2),
    "not spinning": ("0", 2),
    "one thread": (SPINS, 1),
}
_BESIDE = ("nothing", "a busy process", "another training")
STEPS = 100  # of a turn: seconds, or the scheduler's slices would be measured
_WARM = 5


def measure(repeats: int, patience: float, say: Say) -> list[Row]:
    """Measure milliseconds a step for each way of waiting beside each kind of work, medians of alternating turns.

    Args:
        repeats: Turns.
        patience: Seconds to wait for a quiet machine.
        say: Told what is being done.
    """
    timed = {name: _start(spins) for name, (spins, _) in _WAITING.items()}
    companions = {name: _start(spins) for name, (spins, _) in _WAITING.items()}
    quiet = wait_until_quiet(patience)
    rows: list[Row] = []
    for beside in _BESIDE:
        times: dict[str, list[float]] = {name: [] for name in _WAITING}
        for turn in range(repeats):
            say(f"beside {beside}: turn {turn + 1}")
            for name, (_, threads) in _WAITING.items():
                with _other_work(beside, companions[name], threads):
                    measured = timed[name].turn(STEPS, _WARM, threads)
                if measured is None:
                    raise RuntimeError(f"{_METHOD}: {timed[name].error}")
                times[name].append(1e3 * measured[0])
        for name, walls in times.items():
            row = {"waiting": name, "beside": beside, "wall_ms": statistics.median(walls), "walls_ms": walls}
            rows.append({**row, "quiet": quiet, **origin()})
    for entry in (*timed.values(), *companions.values()):
        entry.worker.close()
    return rows


def _start(spins: str) -> Timed:
    return Timed(_METHOD, Worker(("steps", WORKLOAD, "cpu", _METHOD), {"GOMP_SPINCOUNT": spins}))


@contextmanager
def _other_work(kind: str, companion: Timed, threads: int) -> Iterator[None]:
    """Other work, as long as the block lasts."""
    if kind == "a busy process":
        spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            yield
        finally:
            spinning.kill()
            spinning.wait()
    elif kind == "another training":
        # An order at a time: the other training must end with the turn that it disturbs.
        over = threading.Event()

        def train() -> None:
            while not over.is_set():
                companion.turn(steps=20, threads=threads)

        other = threading.Thread(target=train)
        other.start()
        try:
            yield
        finally:
            over.set()
            other.join()
    else:
        yield
