"""The clocks of a worker: it takes orders, and says what their steps took."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

_LOTS, _SECONDS = 60, 30.0  # steps to meet nearly all sizes of lots, and when it is enough of slow ones
_LOTS_OF_GRAPHS = 600  # a size is recorded when it comes again, and that takes as long as several steps


class Watch:
    """Takes orders and times their steps.

    Args:
        device: "cpu" or "cuda".
        answers: Where answers go.
        records: Whether sizes of lots are recorded as graphs.
    """

    def __init__(self, device: str, answers: TextIO, records: bool = False) -> None:
        self._device, self._answers = device, answers
        self._lots = _LOTS_OF_GRAPHS if records and device == "cuda" else _LOTS
        self._cores = sorted(os.sched_getaffinity(0))
        self._threads, self._records = 0, 0
        self._sizes_until: tuple[int, float] | None = None

    def say(self, **answer: Any) -> None:
        """One line to whoever measures."""
        print(json.dumps(answer), file=self._answers, flush=True)

    def start(self) -> int:
        """Wait for an order; ends the process when there are no more.

        Returns:
            Number of steps to make, `step` being called before each.
        """
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # in the middle of a trainer's loop, too
        order = json.loads(line)
        threads = int(order["threads"])
        self._sizes_until = (self._lots, time.monotonic() + _SECONDS) if threads != self._threads else None
        self._use(threads)
        self._warm = int(order.get("warm", 0))
        return self._warm + int(order["steps"])

    def step(self) -> None:
        """Start the clocks if the warm steps are over."""
        if self._warm == 0:
            self._records = 0
            self._wall, self._cpu = time.perf_counter(), time.process_time()
            if self._device == "cuda":
                self._events = _events()
                self._events[0].record()
        self._warm -= 1

    def meets_sizes(self) -> bool:
        """Whether one more step is due, of any number, before those that were ordered; only where sizes differ."""
        if self._sizes_until is None:
            return False
        left, end = self._sizes_until
        self._sizes_until = (left - 1, end) if left > 1 and time.monotonic() < end else None
        return True

    def count(self, records: int) -> None:
        """The size of the lot of the step just made, where sizes differ."""
        self._records += records

    def stop(self) -> None:
        """Stop the clocks and answer."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        if self._device == "cuda":
            import torch

            self._events[1].record()
            torch.cuda.synchronize()
            wall = self._events[0].elapsed_time(self._events[1]) / 1e3
        self.say(wall=wall, cpu=cpu, records=self._records or None)

    def _use(self, threads: int) -> None:
        """So many threads, on as many cores."""
        self._threads = threads
        os.sched_setaffinity(0, self._cores[:threads])
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(threads)


def _events() -> Any:
    import torch

    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)
