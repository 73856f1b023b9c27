"""The record axis' share of a private step's CPU time: `python -m benchmarks axis`.

Steps with it and without it alternate on the same loop, since times of a machine drift by more than the share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.plain import SGD, on_device
from benchmarks.workloads import GPU_WORKLOADS, Workload
from dpbench.callback.loop import PrivateLoop
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.harness.run.runtime import keep_large_blocks
from dpbench.privacy.sampling.fixed_size import FixedSizeSampling
from dpbench.records.watched_step import WatchedStep
from dpbench.strategies import DPSGD

WORKLOADS = ("mnist_cnn b256", "mlp b256", "densenet40 b64")
_WARM = 6  # steps, among them those that are looked at more closely
_LOTS = 8  # that the records would fill
_SECONDS = 45.0  # of CPU time, for each workload
_PAIRS = 30  # of steps, at least: on a shared machine times vary by a fifth


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
    lines = []
    for name in workloads:
        with TemporaryDirectory() as folder:
            lines.append(_share(name, _steps(GPU_WORKLOADS[name], Path(folder)), seconds))
    return lines


def _steps(workload: Workload, folder: Path) -> Iterator[object]:
    """Steps of `PrivateLoop`: guards and ledger, without Lightning; lots of one size, since times are compared."""
    model, x, y = on_device(workload, "cpu")
    records = TensorDataset(x.repeat(_LOTS, *[1] * (x.dim() - 1)), y.repeat(_LOTS))
    strategy = DPSGD(
        noise_multiplier=1.0,
        delta=1e-5,
        seed=1,
        executor="eager",
        ledger=str(folder / "ledger.jsonl"),
    )
    steps = PrivateLoop(
        model,
        SGD(model.parameters()),
        PrivateDataLoader(records, PrivateBatchSampler(FixedSizeSampling(len(records), workload.batch), seed=1)),
        strategy,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        steps=10**6,
    )
    return iter(steps)


def _share(name: str, steps_of_loop: Iterator[object], seconds: float) -> str:
    expect = WatchedStep.expect
    for _ in range(_WARM):
        next(steps_of_loop)
    times: dict[bool, list[float]] = {True: [], False: []}
    end = time.process_time() + seconds
    while time.process_time() < end or len(times[True]) < _PAIRS:
        for is_watched, steps in times.items():

            def expecting(self: Any, rows: int, *facts: Any, is_watched: bool = is_watched, **more: Any) -> None:
                expect(self, rows if is_watched else 0, *facts, **more)

            with mock.patch.object(WatchedStep, "expect", expecting):
                begun = time.process_time()
                next(steps_of_loop)
                steps.append(time.process_time() - begun)
    watched, plain = (statistics.median(times[is_watched]) for is_watched in (True, False))
    share = 1 - plain / watched
    return f"{name}: {1e3 * watched:.1f} ms with the record axis, {1e3 * plain:.1f} ms without: {share:.1%} of a step"
