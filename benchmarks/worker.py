"""One process that steps one method when told to: `python -m benchmarks.worker WORKLOAD METHOD DEVICE`.

Reads orders as lines of JSON, {"steps": n, "warm": w, "threads": t}, and answers each with {"wall": seconds, "cpu":
seconds, "records": number or null}: of n steps after w that do not count, because a process that slept while others
computed has lost its caches. Where lots differ in size it says how many records were in them, and makes many steps more
before the clocks run with another number of threads: PyTorch prepares an operator anew for each size and number.
Says {"ready": ..., "peak_mb": ...} first: the memory that the first two steps took above what model and data hold.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.watch import Watch


def _reset_peak() -> None:
    with suppress(OSError):  # then the peak is that of the whole life of the process
        Path("/proc/self/clear_refs").write_text("5")


def _resident(key: str) -> float:
    """VmRSS, VmHWM or RssFile in MB."""
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
    before, libraries = _resident("VmRSS"), _resident("RssFile")
    for _ in range(steps):
        step()
    mapped = _resident("RssFile") - libraries  # by the first use of an operator: no memory of a step
    return max(_resident("VmHWM") - before - mapped, 0.0)


def main(name: str, method: str, device: str) -> None:
    """Serve orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    watch = Watch(device, answers, records=method.endswith("graph"))
    try:
        import torch

        from benchmarks.methods import PURE, builder, wants_our_allocator
        from benchmarks.plain import DrawnSizes
        from dpbench.privacy import native
        from dpbench.run.runtime import keep_large_blocks

        torch.set_num_threads(1)  # while others start beside it
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
        differs = isinstance(step, DrawnSizes)
        while True:
            steps = watch.start()
            while differs and watch.meets_sizes():
                step()
            for _ in range(steps):
                watch.step()
                step()
                watch.count(step.records if isinstance(step, DrawnSizes) else 0)
            watch.stop()
    except Exception as error:  # whatever a peer may come up with: the others are measured all the same
        watch.say(
            error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]
        )


if __name__ == "__main__":
    main(*sys.argv[1:4])
