"""`dpbench resume` of folders with any name, of damaged checkpoints, and with words that it cannot take."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.harness.runs.folder import RunFolder
from tests.support.cli import dpbench
from tests.support.finished_runs import STEPS

MORE = f"trainer.max_steps={STEPS + 1}"


@pytest.fixture
def stopped(trained: Callable[[str], Path], tmp_path: Path) -> RunFolder:
    """A run as it lies there when it was stopped after its steps."""
    run = RunFolder(Path(shutil.copytree(trained("seeded"), tmp_path / "run")))
    run.result.unlink()
    return run


@pytest.mark.parametrize("name", ["a\\${x}", "k=v, o'é {1}"])
def test_a_folder_of_any_name(name: str, stopped: RunFolder) -> None:
    run = RunFolder(stopped.path.rename(stopped.path.with_name(name)))
    dpbench(run.path.parent, "resume", name, MORE)
    assert [path.name for path in run.path.parent.iterdir()] == [name]
    assert run.result.is_file()


def one_line(run: RunFolder, *words: str) -> str:
    ledger = run.ledger.read_bytes()
    _, err = dpbench(run.path.parent, "resume", "run", *words, status=1)
    assert run.ledger.read_bytes() == ledger
    assert err.startswith("dpbench: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run.resume=false", "cannot be changed"),
        ("trainer.max_steps=2", f"trainer.max_steps=2 is less than the {STEPS} steps that"),
        (f"{MORE} model.hidden=[9]", "overrides that change them (Error(s) in loading state_dict for"),
    ],
)
def test_words_that_a_resumed_run_cannot_take(words: str, message: str, stopped: RunFolder) -> None:
    assert message in one_line(stopped, *words.split())


@pytest.mark.parametrize("content", [b"PK\x03\x04 cut", b"\x80\x04]\x94."])
def test_a_file_that_is_no_checkpoint(content: bytes, stopped: RunFolder) -> None:
    stopped.checkpoint.write_bytes(content)
    assert str(RunFolder.checkpoint) in one_line(stopped, MORE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer_states": []}, "optimizer_states: list should have at least 1 item"),
        ({"loops": {}}, "loops.fit_loop: field required"),
        ({"global_step": "3"}, "global_step: input should be a valid integer"),
    ],
)
def test_a_checkpoint_that_lacks_something(change: dict[str, Any], message: str, stopped: RunFolder) -> None:
    state = torch.load(stopped.checkpoint, weights_only=False)
    torch.save({**state, **change}, stopped.checkpoint)
    err = one_line(stopped, MORE)
    assert f"{RunFolder.checkpoint} is not a checkpoint: restore a copy of" in err and message in err
