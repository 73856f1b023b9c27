"""Times of steps in one process, in turn, by the clock of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import measure as others
from benchmarks.gpu.ways import SEEDS, WAYS
from benchmarks.methods import REFERENCE, builder
from benchmarks.plain import Step
from benchmarks.workloads import WORKLOADS, Workload

_DENSENET = "densenet40 b64, microbatches of 8"
GPU_WORKLOADS = {
    **WORKLOADS,
    "mnist_cnn b2048": replace(WORKLOADS["mnist_cnn b256"], name="mnist_cnn b2048", batch=2048),
    "densenet40 b512, microbatches of 4": replace(
        WORKLOADS[_DENSENET], name="densenet40 b512, microbatches of 4", batch=512, microbatch_size=4
    ),
}
_PLAIN = ("plain/channels_last", "plain/contiguous", "plain/channels_last compiled")
_OURS = ("ours/flat", "ours/per_layer", "ours/adaptive_quantile", "ours/adaptive_mean", "ours/discretized")
_OPACUS = ("opacus/hooks", "opacus/functorch", "opacus/ghost")
METHODS = (*_PLAIN, *_OURS, *_OPACUS, "harness/no privacy", "harness/flat", "harness/flat graph", *WAYS)
_COMPILED = ("mnist_cnn b256", "small_alexnet b128")  # minutes of compilation elsewhere


def methods_for(name: str) -> list[str]:
    """What is measured on a workload."""
    workload, chosen = GPU_WORKLOADS[name], list(METHODS)
    if name not in _COMPILED:
        chosen = [m for m in chosen if "compiled" not in m]
    if not workload.harness or workload.name not in WORKLOADS:
        chosen = [m for m in chosen if not m.startswith("harness/")]
    if len(workload.input_shape) == 2:  # recurrent layers and attention: the only way in which Opacus runs them
        chosen = [m for m in chosen if m not in ("opacus/functorch", "opacus/ghost", "seeds/flat")]
    if not workload.name.startswith(("mnist", "mlp", "small")):
        chosen = [m for m in chosen if not m.startswith("loop/")]
    if workload.microbatch_size > 1:
        chosen = [m for m in chosen if m in ("plain/channels_last", "ours/flat", "ours/discretized", "bf16/plain")]
    return chosen


@dataclass
class _Timed:
    method: str
    step: Step | None = None
    worker: others.Process | None = None
    peak_mb: float | None = None
    error: str | None = None
    guess: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def close(self) -> None:
        self.step = None
        if self.worker is not None:
            self.worker.pipe.kill()
            self.worker.pipe.wait()


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], steps: int, device: str) -> float:
    """Seconds of one of so many steps."""
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - start) / steps


def _made(method: str, workload: Workload, device: str) -> Step:
    if method in WAYS:
        return WAYS[method](workload, device)
    return builder(method, workload, device)()


def _begin(method: str, workload: Workload, device: str) -> _Timed:
    """Make the first steps; whatever goes wrong is the row's."""
    new = _Timed(method)
    try:
        if method.startswith("harness/"):
            new.worker = others.start(workload.name, method, device)
            new.error = new.worker.error
            return new
        step = _made(method, workload, device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        for _ in range(2):
            step()
        wait(device)
        if device == "cuda":
            new.peak_mb = (torch.cuda.max_memory_allocated() - allocated) / 2**20
        new.guess, new.step = timed(step, 1, device), step
    except Exception as error:
        new.error = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return new


def _turn(one: _Timed, device: str, turn: float) -> None:
    if one.worker is not None:
        one.worker.turn(2, cpu=False)
        one.error, one.seconds = one.worker.error, list(one.worker.walls)
    elif one.step is not None:
        try:
            timed(one.step, 1, device)  # caches are others' now
            one.seconds.append(timed(one.step, max(1, round(turn / max(one.guess, 1e-5))), device))
            one.guess = one.seconds[-1]
        except Exception as error:
            one.error, one.step = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200], None


def apart(methods: Sequence[str]) -> list[list[str]]:
    """Groups that are measured in a process of their own: what fails in one leaves the others' device as it was."""
    groups = [[m for m in methods if ("graph" in m) == graphs] for graphs in (False, True)]
    return [group for group in groups if group]


def measure(name: str, methods: Sequence[str], device: str, repeats: int, turn: float) -> list[dict[str, Any]]:
    """Rows of a workload's methods, as `benchmarks.measure.measure` gives them.

    Args:
        name: Of the workload.
        methods: Names of the methods.
        device: "cpu" or "cuda".
        repeats: Turns that count, after one that does not.
        turn: Seconds of a turn.
    """
    workload = GPU_WORKLOADS[name]
    every = [_begin(method, workload, device) for method in dict.fromkeys([REFERENCE, *methods])]
    for _ in range(1 + repeats):
        for one in every:
            _turn(one, device, turn)
    rows = [_row(name, one, device, skip=int(repeats > 0)) for one in every]
    for one in every:
        one.close()
    for row in rows:
        row["reference_wall_ms"], row["reference_cpu_ms"] = rows[0]["wall_ms"], None
    return [row for row in rows if row["method"] in methods]


def _row(name: str, one: _Timed, device: str, skip: int) -> dict[str, Any]:
    at_once = SEEDS if one.method.startswith("seeds/") else 1
    times = [1e3 * seconds / at_once for seconds in one.seconds[skip:] or one.seconds]
    failed = one.error is not None or not times
    return {
        "workload": name,
        "method": one.method,
        "device": device,
        "threads": None,
        "wall_ms": None if failed else statistics.median(times),
        "wall_ms_range": None if failed else [min(times), max(times)],
        "cpu_ms": None,
        "peak_mb": None if failed else one.peak_mb,
        "quiet": True,
        "error": one.error or (None if times else "no turn was made"),
    }


def batches() -> Mapping[str, int]:
    """Records of a lot of each workload."""
    return {name: workload.batch for name, workload in GPU_WORKLOADS.items()}
