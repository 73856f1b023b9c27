"""How time and memory of a step grow with the lot and with the network's width: `python -m benchmarks growth`."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from benchmarks.workloads import CIFAR, MNIST, WORKLOADS, Workload
from dpbench.models import MLP, SmallAlexNet

METHODS = (
    "plain/channels_last",
    "ours/flat",
    "ours/flat pure",
    "opacus/hooks default malloc",
    "opacus/ghost default malloc",
)
LOTS = (16, 64, 256, 1024, 4096)
WIDTHS = {"small_alexnet": (16, 32, 64, 128), "mlp": (250, 1000, 4000)}


def growth_workloads() -> list[str]:
    """Names of all points."""
    lots = [f"{model} lot {lot}" for model in ("mnist_cnn", "small_alexnet") for lot in LOTS]
    return lots + [f"{model} width {width}" for model, widths in WIDTHS.items() for width in widths]


def skipped(name: str, method: str) -> bool:
    """Points that would take ten gigabytes or more."""
    large = name in {"small_alexnet lot 4096", "mlp width 4000"}
    return large and method.startswith("opacus/hooks")


def workload_named(name: str) -> Workload:
    """A workload of the benchmark, or a point of the growth curves."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    match = re.fullmatch(r"(\w+) (lot|width) (\d+)", name)
    assert match is not None, name
    model, kind, size = match[1], match[2], int(match[3])
    base = next(workload for workload in WORKLOADS.values() if workload.name.startswith(model + " "))
    if kind == "lot":
        return replace(base, name=name, batch=size)
    build = partial(SmallAlexNet, CIFAR, 10, size) if model == "small_alexnet" else partial(MLP, MNIST, 10, (size,))
    return replace(base, name=name, build=build)
