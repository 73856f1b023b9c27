"""The record axis' share of a private step's CPU time: `python -m benchmarks axis`.

Steps with it and without it alternate on the same loop, since times of a machine drift by more than the share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks.ours import loop
from benchmarks.workloads import workload_named
from dpbench.records.watched_step import WatchedStep
from dpbench.run.runtime import keep_large_blocks

WORKLOADS = ("mnist_cnn b256", "mlp b256", "densenet40 b64")
_WARM = 6  # steps, among them those that are looked at more closely
_SECONDS = 45.0  # of CPU time, for each workload


def shares(workloads: Sequence[str] = WORKLOADS, seconds: float = _SECONDS) -> list[str]:
    """Measure steps with the record axis and without, one after the other.

    Args:
        workloads: Names of the benchmark's.
        seconds: CPU time for each.

    Returns:
        A line for each workload.
    """
    torch.set_num_threads(1)
    keep_large_blocks()  # as `dpbench train` does: memory that is given back and taken again would be measured, too
    return [_share(name, seconds) for name in workloads]


def _share(name: str, seconds: float) -> str:
    step, _ = loop(workload_named(name), "cpu", "eager")
    expect = WatchedStep.expect
    for _ in range(_WARM):
        step()
    times: dict[bool, list[float]] = {True: [], False: []}
    end = time.process_time() + seconds
    while time.process_time() < end:
        for is_watched, steps in times.items():

            def expecting(self: Any, rows: int, *facts: Any, is_watched: bool = is_watched, **more: Any) -> None:
                expect(self, rows if is_watched else 0, *facts, **more)

            with mock.patch.object(WatchedStep, "expect", expecting):
                begun = time.process_time()
                step()
                steps.append(time.process_time() - begun)
    watched, plain = (statistics.median(times[is_watched]) for is_watched in (True, False))
    share = 1 - plain / watched
    return f"{name}: {1e3 * watched:.1f} ms with the record axis, {1e3 * plain:.1f} ms without: {share:.1%} of a step"
