"""The benchmark on a GPU: its methods, its goals, and Opacus on the network that is timed there alone."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import pages
from benchmarks.__main__ import main
from benchmarks.methods import GPU_METHODS, methods_for
from benchmarks.opacus_ import opacus, without_parametrizations
from benchmarks.workloads import GPU_WORKLOADS
from dpbench.models import WideResNet


def test_methods_of_each_workload_are_known() -> None:
    for name in GPU_WORKLOADS:
        assert {"plain/channels_last", "ours/flat"} <= set(methods_for(name, "cuda")) <= set(GPU_METHODS)


def test_every_goal_is_measured() -> None:
    with (Path(pages.__file__).parent / "goals.csv").open(encoding="utf-8", newline="") as file:
        goals = [goal for goal in csv.DictReader(file) if goal["section"] == "gpu"]
    assert goals
    for goal in goals:
        methods = methods_for(goal["workload"], "cuda")
        assert goal["method"] in methods
        if goal["measure"] == "ratio":
            assert goal["other"] in methods
        if goal["measure"] == "best_peer":
            assert any(method.startswith("opacus/") for method in methods)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_opacus_trains_the_same_network_with_weight_standardization(mode: str) -> None:
    build = partial(WideResNet, (3, 8, 8), 10, depth=10, width=1)
    workload = replace(GPU_WORKLOADS["wide_resnet b256"], build=build, input_shape=(3, 8, 8), batch=4)
    x, _ = workload.data()
    network = workload.model()
    outputs = network(x)
    assert torch.equal(without_parametrizations(network)(x), outputs)
    step = opacus(workload, mode, "cpu", torch.contiguous_format)
    step()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "there is no GPU: leave --device out." in capsys.readouterr().err
