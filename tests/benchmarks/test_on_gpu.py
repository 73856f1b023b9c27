"""The benchmark on a GPU: its methods, its goals, and Opacus on the network that is timed there alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import pages
from benchmarks.__main__ import main
from benchmarks.methods import methods_for


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "there is no GPU: leave --device out." in capsys.readouterr().err
