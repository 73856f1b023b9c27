"""The worker's side of a measurement: takes orders through a pipe, and says how long its steps took.

An order is {"method": name, "steps": n, "warm": w, "threads": t or None}. The answer {"wall": seconds, "cpu": seconds,
"records": number or None} is of n steps after w that do not count, because a process that slept while others computed
has lost its caches. Needs the standard library only: some peers live in environments of their own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import machine

_PATIENCE = 30.0  # seconds, after which slow steps have met enough sizes


class Orders:
    """Serves orders: makes steps that are functions, and paces the loops of others.

    A loop that is not ours (Lightning's, pfl's, Flower's) calls `advance` between its steps, which returns when the
    next one is due. So what is timed is the loop as it is.

    Args:
        pipe: Orders come from it, answers go into it.
        device: "cpu" or "cuda".
        sizes: Steps that do not count, made whenever the number of threads changes: where lots differ in size, PyTorch
            prepares an operator anew for each size and number of threads.
        cpu_clock: CPU seconds so far.

    Attributes:
        functions: Steps that are a function, by method; any other method is the loop that calls `advance`.
    """

    def __init__(
        self,
        pipe: Connection,
        device: str = "cpu",
        sizes: int = 0,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self.functions: dict[str, Callable[[], object]] = {}
        self._pipe = pipe
        self._device = device
        self._sizes = sizes
        self._cpu_clock = cpu_clock
        self._cores = sorted(os.sched_getaffinity(0))
        self._threads: int | None = None
        self._records = 0
        self._due = self._steps()

    def say(self, **answer: Any) -> None:
        """Answer, or say that orders may come."""
        self._pipe.send(answer)

    def advance(self, records: int = 0) -> None:
        """Return when the loop that calls this is to make its next step; end the process after the last order.

        Args:
            records: In the lot of the step just made, where lots differ in size.
        """
        self._records += records
        next(self._due)

    def _steps(self) -> Iterator[None]:
        """Yield once for each step that the calling loop is to make."""
        while True:
            try:
                order = self._pipe.recv()
            except EOFError:
                os._exit(0)  # in the middle of a trainer's loop, too
            step = self.functions.get(order["method"])
            if step is None:
                yield from self._timed(order)
                continue
            try:
                for _ in self._timed(order):
                    step()
                    self._records += getattr(step, "records", 0)
            except Exception as error:  # the other methods of this process are measured all the same
                del self.functions[order["method"]]
                self.say(error=one_line(error))

    def _timed(self, order: dict[str, Any]) -> Iterator[None]:
        """Yield before each step of an order, and answer after the last."""
        threads = order["threads"]
        if threads is not None and threads != self._threads:
            self._use(threads)
            end = time.monotonic() + _PATIENCE
            for _ in range(self._sizes):
                if time.monotonic() > end:
                    break
                yield
        for _ in range(order["warm"]):
            yield
        # What came before must not be waited for by what is timed.
        self._wait()
        self._records = 0
        cpu = self._cpu_clock()
        wall = time.perf_counter()
        for _ in range(order["steps"]):
            yield
        self._wait()
        wall = time.perf_counter() - wall
        cpu = self._cpu_clock() - cpu
        self.say(wall=wall, cpu=cpu, records=self._records or None)

    def _wait(self) -> None:
        """Until the device has done what it was given."""
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()

    def _use(self, threads: int) -> None:
        """So many threads, on as many cores."""
        self._threads = threads
        # Threads that share a core with others of the same operator wait for one another.
        os.sched_setaffinity(0, self._cores[:threads])
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(threads)


def one_line(error: BaseException) -> str:
    """An error in a row of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


class PeakMemory:
    """The memory that is taken from now on at most, above what is held now.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self._before = float(torch.cuda.memory_allocated())
        else:
            machine.reset_peak()
            self._before = machine.resident_mb("VmRSS")
            self._libraries = machine.resident_mb("RssFile")

    def mb(self) -> float:
        """So far, in MB."""
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - self._before) / 2**20
        mapped = machine.resident_mb("RssFile") - self._libraries  # by the first use of an operator: of no step
        return max(machine.resident_mb("VmHWM") - self._before - mapped, 0.0)


def first_steps(step: Any, device: str, steps: int = 2) -> float:
    """Make the first steps and return the memory in MB that they took at most, above what model and data hold."""
    peak = PeakMemory(device)
    for _ in range(steps):
        step()
    return peak.mb()
