"""The script for GPUs, tried on the CPU: what it checks, what it times, what it writes."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import checks, report
from benchmarks.gpu.measure import GPU_WORKLOADS, METHODS, apart, measure, methods_for
from benchmarks.gpu.rounds import in_turn, together
from benchmarks.gpu.run import PARTS
from benchmarks.gpu.ways import WAYS
from benchmarks.users.tasks import TASKS
from dpbench.privacy.randomness import keyed_generator

QUICK = [name for name in checks.CHECKS if name not in ("resumed", "two processes", "strategies")]


@pytest.mark.parametrize("name", QUICK)
def test_what_must_hold(name: str, tmp_path: Path) -> None:
    row = checks.checked(name, "cpu", tmp_path)
    assert row["holds"], row["found"]


@pytest.mark.long  # the tests of ledgers, DDP and strategies make the same statements; here it is the page's
@pytest.mark.parametrize("name", [name for name in checks.CHECKS if name not in QUICK])
def test_what_must_hold_too(name: str, tmp_path: Path) -> None:
    row = checks.checked(name, "cpu", tmp_path)
    assert row["holds"], row["found"]


def test_what_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def twice(total: torch.Tensor, stds: Any, key: Any) -> torch.Tensor:
        return total.normal_(generator=keyed_generator(key)).mul_(2 * stds[0][1])

    monkeypatch.setattr(checks, "add_gaussian_noise", twice)
    row = checks.checked("noise", "cpu", tmp_path)
    assert not row["holds"] and row["found"].startswith("AssertionError: variances")


_LONG = ("seeds/flat", "compiled/flat")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way in _LONG else way for way in WAYS])
def test_each_way_makes_steps(way: str) -> None:
    rows = measure("mlp b256", [way], "cpu", repeats=0, turn=0.0)
    assert [row["method"] for row in rows] == [way]
    if way != "compiled/flat":  # where there is no compiler, the row says so
        assert rows[0]["error"] is None and rows[0]["wall_ms"] > 0


def test_graphs_have_a_process_of_their_own() -> None:
    for name in GPU_WORKLOADS:
        chosen = methods_for(name)
        groups = apart(chosen)
        assert sorted(chain(*groups)) == sorted(chosen) and set(chosen) <= set(METHODS)
        assert all(len({"graph" in method for method in group}) == 1 for group in groups)


def test_users_at_once_are_users_in_turn() -> None:
    task = TASKS["mlp_2nn 5x20"]
    torch.manual_seed(0)
    together(task, 3, 2, "cpu")()
    assert len(in_turn(task, 2, 1, "cpu")) == 1


@pytest.mark.slow
def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpu", "--device", "cpu", "--parts", "steps", "--workloads", "mlp b256", "--out", str(tmp_path)]
    assert main([*words, "--methods", "plain/channels_last,ours/flat,graph/flat"]) == 0
    page = Path(capsys.readouterr().out.strip())
    kept = json.loads(page.with_suffix(".json").read_text())
    assert {row["method"] for row in kept["steps"]} == {"plain/channels_last", "ours/flat", "graph/flat"}
    assert "| mlp b256 |" in page.read_text() and page.with_suffix(".png").exists()
    kept["checks"]["noise"] = {**kept["steps"][0], "about": "It is there.", "holds": False, "found": "no | noise"}
    kept["rounds"]["mlp"] = {**kept["steps"][0], "users": 10, "one after the other": 20.0, "10 at once": "KeyError: no"}
    text = report.markdown(kept, "gpu")
    assert "| It is there. | **no** | no / noise |" in text and "| mlp | 10 | 20 | KeyError: no |" in text


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--device", "cpu", "--parts", "speed"]) == 2
    assert f"there is no part 'speed'; known: {'; '.join(PARTS)}." in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["gpu"]) == 2
        assert "there is no GPU: try all of it with --device cpu." in capsys.readouterr().err
