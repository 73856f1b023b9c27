"""Questions on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.errors import ConfigurationError
from dpbench.run.flags import asks, in_order, sweeps

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
    assert asks(["--cfg", "job"]) and asks(["optimizer.lr=1", "--info"])
    assert not asks(["-m", "seed=1,2"])
    with pytest.raises(ConfigurationError, match="only one of --multirun and --cfg"):
        asks(["-m", "--cfg", "job"])
    assert in_order(["seed=1", "-m", "optimizer.lr=1"]) == ["-m", "seed=1", "optimizer.lr=1"]


def test_a_sweep_is_one_however_it_is_spelled() -> None:
    for words in (["-m"], ["--multirun"], ["--multi"], ["hydra.mode=MULTIRUN"], ["++hydra.mode=multirun"]):
        assert sweeps([*words, "seed=1,2"]), words
    for words in ([], ["hydra.mode=RUN"], ["run.name=-m"]):
        assert not sweeps(words), words
