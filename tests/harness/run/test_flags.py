"""Questions on the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.harness.run.command_line import parse
from dpbench.harness.run.jobs import launch
from dpbench.harness.runs.folder import RunFolder
from dpbench.privacy.accounting import ledger

PROGRAM = """\
import sys
from dpbench.cli import main
assert main(sys.argv[1:]) == 0
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("question", "answer"),
    [("train --cfg job optimizer.lr=0.3", "lr: 0.3"), ("reproduce list", "gradient_compression/table1")],
)
def test_a_question_is_answered_without_pytorch(question: str, answer: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, *question.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert answer in done.stdout
    assert not list(tmp_path.iterdir())


def test_flags_and_overrides_in_any_order() -> None:
    flags = parse(["seed=1", "-m", "optimizer.lr=1", "--config-dir=mine"])
    assert flags.multirun and flags.cfg is None and flags.config_dir == Path("mine")
    assert flags.overrides == ["seed=1", "optimizer.lr=1"]


def test_a_sweep_is_one_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs: list[int] = []
    launch(["hydra.mode=MULTIRUN", "seed=1,2", "logger=none", "model=mlp"], task=lambda cfg: jobs.append(cfg.seed))
    assert jobs == [1, 2]


def test_files_of_a_run_are_named_as_by_those_who_write_them() -> None:
    """Its folder imports none of them, so that a typo is answered without numpy."""
    assert RunFolder.ledger == ledger.FILE_NAME
