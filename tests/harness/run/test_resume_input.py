"""`dpbench resume` of folders with any name, of damaged checkpoints, and with words that it cannot take."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.cli import main
from dpbench.harness.runs.folder import RunFolder
from tests.support.finished_runs import STEPS

STATE = dict[str, Any]


@pytest.fixture(scope="module")
def stopped(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as it lies there when it was stopped after its steps."""
    run = Path(shutil.copytree(trained("seeded"), tmp_path_factory.mktemp("stopped") / "run"))
    RunFolder(run).result.unlink()
    return run


@pytest.mark.parametrize("name", ["o'neil", "odd ${x} dir", "odd\\", "a\\'b", "a\\${x}", "k=v, é {1}", "run"])
def test_a_folder_of_any_name(name: str, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(stopped, tmp_path / name)
    assert main(["resume", name, f"trainer.max_steps={STEPS + 1}"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert RunFolder(tmp_path / name).result.is_file()


def one_line(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    ledger = (run / "ledger.jsonl").read_bytes()
    assert main(["resume", str(run), *words]) == 1
    assert (run / "ledger.jsonl").read_bytes() == ledger
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("hydra.run.dir=elsewhere", "hydra.run.dir=elsewhere cannot be changed: a run is resumed in its own folder"),
        ("++hydra.run.dir=elsewhere", "cannot be changed"),
        ("hydra.mode=MULTIRUN", "cannot be changed"),
        ("run.resume=false", "cannot be changed"),
        ("trainer.max_steps=2", f"trainer.max_steps=2 is less than the {STEPS} steps that"),
        (
            "trainer.max_steps=9 model.hidden=[9]",
            "overrides that change them (Error(s) in loading state_dict for",
        ),
    ],
)
def test_words_that_a_resumed_run_cannot_take(
    words: str,
    message: str,
    stopped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(stopped, tmp_path / "run")
    assert message in one_line(capsys, run, *words.split())
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("optimizer_states"), "optimizer_states: field required"),
        (lambda state: state.update(optimizer_states=[]), "optimizer_states: list should have at least 1 item"),
        (lambda state: state.update(loops={}), "loops.fit_loop: field required"),
        (lambda state: state.update(callbacks=[]), "callbacks: input should be a valid dictionary"),
        (lambda state: state.update(global_step="3"), "global_step: input should be a valid integer"),
    ],
)
def test_a_checkpoint_that_lacks_something(
    damage: Callable[[STATE], object], message: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    state = torch.load(RunFolder(run).checkpoint, weights_only=False)
    damage(state)
    torch.save(state, RunFolder(run).checkpoint)
    err = one_line(capsys, run, f"trainer.max_steps={STEPS + 1}")
    assert f"{RunFolder(run).checkpoint} is no checkpoint: restore a copy of" in err
    assert message in err
