"""One process that steps one method when told to: `python -m benchmarks.worker WORKLOAD METHOD DEVICE`.

Reads orders as lines of JSON, {"steps": n, "warm": w, "threads": t}, and answers each with {"wall": seconds, "cpu":
seconds}: of n steps after w that do not count, because a process that slept while others computed has lost its caches.
Says {"ready": ..., "peak_mb": ...} first: the memory that the first two steps took above what model and data hold.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


class Watch:
    """Takes orders and times their steps.

    Args:
        device: "cpu" or "cuda".
        answers: Where answers go.
    """

    def __init__(self, device: str, answers: TextIO) -> None:
        self._device, self._answers = device, answers
        self._cores = sorted(os.sched_getaffinity(0))

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
        self._use(int(order["threads"]))
        self._warm = int(order.get("warm", 0))
        return self._warm + int(order["steps"])

    def step(self) -> None:
        """Start the clocks if the warm steps are over."""
        if self._warm == 0:
            self._wall, self._cpu = time.perf_counter(), time.process_time()
            if self._device == "cuda":
                self._events = _events()
                self._events[0].record()
        self._warm -= 1

    def stop(self) -> None:
        """Stop the clocks and answer."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        if self._device == "cuda":
            import torch

            self._events[1].record()
            torch.cuda.synchronize()
            wall = self._events[0].elapsed_time(self._events[1]) / 1e3
        self.say(wall=wall, cpu=cpu)

    def _use(self, threads: int) -> None:
        """So many threads, on as many cores."""
        os.sched_setaffinity(0, self._cores[:threads])
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(threads)


def _events() -> Any:
    import torch

    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


def _reset_peak() -> None:
    with suppress(OSError):  # then the peak is that of the whole life of the process
        Path("/proc/self/clear_refs").write_text("5")


def _resident(key: str) -> float:
    """VmRSS or VmHWM in MB."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(key))) / 1024
    except (OSError, StopIteration):
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024


def first_steps(step: Any, device: str, steps: int = 2) -> float:
    """Make the first steps and return the memory in MB that they took at most."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - allocated) / 2**20
    _reset_peak()
    before = _resident("VmRSS")
    for _ in range(steps):
        step()
    return max(_resident("VmHWM") - before, 0.0)


def main(name: str, method: str, device: str) -> None:
    """Serve orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    watch = Watch(device, answers)
    try:
        from benchmarks.methods import PURE, builder, wants_our_allocator
        from dpbench.privacy import native
        from dpbench.training.allocator import keep_large_blocks

        native.select("off" if method.endswith(PURE) else "auto")
        if wants_our_allocator(method):
            keep_large_blocks()
        from benchmarks.growth import workload_named

        workload = workload_named(name)
        if method.startswith("harness/"):
            from benchmarks.ours import harness

            harness(workload, method.removeprefix("harness/"), device, watch)
            return
        step = builder(method, workload, device)()
        watch.say(ready=True, peak_mb=first_steps(step, device))
        while True:
            for _ in range(watch.start()):
                watch.step()
                step()
            watch.stop()
    except Exception as error:  # whatever a peer may come up with: the others are measured all the same
        watch.say(
            error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
        )


if __name__ == "__main__":
    main(*sys.argv[1:4])
