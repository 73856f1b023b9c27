"""The benchmark on a GPU, tried on the CPU: its ways to make a step, what it times, its page."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch

from benchmarks import pages
from benchmarks.__main__ import main
from benchmarks.gpu_ways import WAYS
from benchmarks.methods import GPU_METHODS, builder, methods_on_gpu, together
from benchmarks.opacus_ import opacus, without_parametrizations
from benchmarks.users import plain
from benchmarks.users.tasks import TASKS
from benchmarks.workloads import GPU_WORKLOADS, WORKLOADS, with_smaller_lots, workload_named
from dpbench.models import SmallAlexNet, WideResNet

SLOW = ("seeds/flat", "compiled/flat")  # and without a compiler the last one fails


# torch.compile looks at `.grad` of whatever it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) if way in SLOW else way for way in WAYS])
def test_each_way_makes_steps(way: str) -> None:
    step = builder(way, WORKLOADS["mlp b256"], "cpu")()
    try:
        step()
    except torch._dynamo.exc.BackendCompilerFailed:  # type: ignore[attr-defined]
        assert way == "compiled/flat"


def test_graphs_have_a_process_of_their_own() -> None:
    for name in GPU_WORKLOADS:
        chosen = methods_on_gpu(name)
        groups = together(chosen, "cuda")
        assert sorted(chain(*groups)) == sorted(chosen) and set(chosen) <= set(GPU_METHODS)
        assert all(len({"graph" in method for method in group}) == 1 for group in groups)
        assert all(len({"triton" in method for method in group}) == 1 for group in groups)


def test_every_goal_is_measured() -> None:
    """By a part of `python -m benchmarks gpu`; with microbatches, there is no peer."""
    with (Path(pages.__file__).parent / "goals.csv").open(encoding="utf-8", newline="") as file:
        goals = [goal for goal in csv.DictReader(file) if goal["section"] == "gpu"]
    assert goals
    for goal in goals:
        methods = methods_on_gpu(goal["workload"])
        assert goal["method"] in methods
        if goal["measure"] == "ratio":
            assert goal["other"] in methods
        if goal["measure"] == "best_peer":
            assert any(method.startswith("opacus/") for method in methods)
        assert methods_on_gpu(with_smaller_lots(goal["workload"], 16)) == methods


def test_views_of_a_record_are_clipped_together() -> None:
    name = with_smaller_lots("wide_resnet b64, 4 views", 2)
    workload = replace(workload_named(name), build=partial(SmallAlexNet, (3, 32, 32), 10))
    rows, labels = workload.data()
    assert len(rows) == 8 and labels[:4].unique().numel() == 1
    builder("ours/flat", workload, "cpu")()()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_opacus_trains_the_same_network_with_weight_standardization(mode: str) -> None:
    build = partial(WideResNet, (3, 8, 8), 10, depth=10, width=1)
    workload = replace(workload_named("wide_resnet b256"), build=build, input_shape=(3, 8, 8), batch=4)
    x, _ = workload.data()
    network = workload.model()
    outputs = network(x)
    assert torch.equal(without_parametrizations(network)(x), outputs)
    step = opacus(workload, mode, "cpu", torch.contiguous_format)
    step()


def test_several_users_at_once_make_a_round() -> None:
    torch.manual_seed(0)
    plain.together(TASKS["mlp_2nn 5x20"], 3, 2, "cpu")()


@pytest.mark.long
def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpu", "--device", "cpu", "--parts", "steps", "--workloads", "mlp b256", "--out", str(tmp_path)]
    assert main([*words, "--methods", "plain/channels_last,ours/flat,graph/flat"]) == 0
    *goals, last = capsys.readouterr().out.strip().splitlines()
    assert any("mlp b256: discretized" in line and "not measured" in line for line in goals)
    page = Path(last)
    kept = json.loads(page.with_suffix(".json").read_text())
    assert {row["method"] for row in kept["steps"]} == {"plain/channels_last", "ours/flat", "graph/flat"}
    text = page.read_text()
    assert "| mlp b256, lots of 16 |" in text and "Tried only" in text and page.with_suffix(".png").exists()
    check = {**kept["steps"][0], "about": "It is there.", "holds": False, "found": "no | noise"}
    kept["checks"] = {"noise": check}  # as files of 2026 have them
    kept["rounds"]["mlp"] = {**kept["steps"][0], "users": 10, "one after the other": 20.0, "10 at once": "KeyError: no"}
    page.with_suffix(".json").write_text(json.dumps(kept))
    text = pages.write(page.with_suffix(".json")).read_text()
    assert "| It is there. | **no** | no / noise |" in text and "| mlp | 10 | 20 | KeyError: no |" in text


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--device", "cpu", "--parts", "speed"]) == 2
    assert "there is no part 'speed'; known: steps; triton; large; rounds." in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["gpu"]) == 2
        assert "there is no GPU: try all of it with --device cpu." in capsys.readouterr().err
