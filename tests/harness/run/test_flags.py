"""Questions on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.harness.run.command_line import CommandLine
from dpbench.harness.run.jobs import launch

PROGRAM = """\
import sys
from dpbench.cli import main
assert main(sys.argv[1:]) == 0
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("question", [["train", "--cfg", "job", "optimizer.lr=0.3"], ["reproduce", "list"]])
def test_a_question_is_answered_without_pytorch(question: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *question]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert ("lr: 0.3" if "--cfg" in question else "gradient_compression/table1") in done.stdout


def test_what_asks_and_what_runs() -> None:
    for words in (["--cfg", "job"], ["optimizer.lr=1", "--info"]):
        assert CommandLine.parse(words).is_question
    assert not CommandLine.parse(["-m", "seed=1,2"]).is_question
    assert CommandLine.parse(["seed=1", "-m", "optimizer.lr=1"]).in_order == ("-m", "seed=1", "optimizer.lr=1")


@pytest.mark.parametrize("words", [["-m"], ["--multirun"], ["hydra.mode=MULTIRUN"]])
def test_a_sweep_is_one_however_it_is_spelled(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs: list[int] = []
    launch([*words, "seed=1,2", "logger=none", "model=mlp"], task=lambda cfg: jobs.append(cfg.seed))
    assert jobs == [1, 2]
