"""Several processes end well: errors are told in one line, and a process that dies loses nothing that was finished.

Forked processes start at once; what the end of the interpreter does needs spawned ones (tests/strategies/test_ddp.py).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from dpbench.errors import DPBenchError, Interrupted, WorkerDied
from dpbench.harness.run._resume import prepare_folder
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import weights
from tests.support.processes import TWO, config_of, content_of
from tests.support.signalled import Signals


class Dies(pl.Callback):
    """Kills one process with a signal or an error, after a step or when everything is done."""

    def __init__(self, rank: int, step: int | None, by: signal.Signals | Exception = signal.SIGKILL) -> None:
        self._rank, self._step, self._by = rank, step, by

    def _at(self, trainer: pl.Trainer, step: int | None) -> None:
        if (trainer.global_rank, step) != (self._rank, self._step) or trainer.world_size == 1:
            return
        if isinstance(self._by, Exception):
            raise self._by
        if self._by != signal.SIGKILL:
            signal.signal(self._by, signal.SIG_DFL)
        os.kill(os.getpid(), self._by)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._at(trainer, trainer.global_step)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which the second process aborts when everything is done: nothing is lost."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with pytest.warns(UserWarning, match="process 1 of 2 .* died .*SIGABRT.*: nothing is lost"):
        train(config_of(*TWO), run, [Dies(1, None, signal.SIGABRT)])
    return run


@pytest.mark.parametrize(
    ("rank", "step", "number"),
    [(1, 5, signal.SIGKILL), pytest.param(0, None, signal.SIGABRT, marks=pytest.mark.long)],
)
def test_a_process_that_is_killed_is_one_line_and_its_run_goes_on(
    rank: int, step: int | None, number: signal.Signals, tmp_path: Path, whole: Path
) -> None:
    """The first one is to evaluate at the end: where it aborts, a resume does that alone."""
    run = RunFolder(tmp_path / "run")
    told = f"process {rank} of 2 .* died .*{number.name}.*continue with: dpbench resume"
    with pytest.raises(WorkerDied, match=told) as caught:
        train(config_of(*TWO), run.path, [Dies(rank, step, number)])
    assert "\n" not in str(caught.value) and isinstance(caught.value, DPBenchError)
    assert not run.finished and len(read_ledger(run.ledger).releases) >= (step or 8)
    (run.path / ".metrics.csv.4711").touch()
    train(config_of(*TWO, "run.resume=true"), run.path)
    assert not (run.path / ".metrics.csv.4711").exists()
    assert content_of(run.path) == content_of(whole)


def test_an_error_of_another_process_comes_out_as_it_was(tmp_path: Path) -> None:
    """While the first one waits for it."""
    with pytest.raises(PermissionError, match="Permission denied"):
        train(config_of(*TWO), tmp_path / "run", [Dies(1, 1, PermissionError(13, "Permission denied"))])


@pytest.mark.parametrize(("first", "then"), [(TWO, []), ([], TWO)], ids=["2-1", "1-2"])
def test_a_run_goes_on_with_another_number_of_processes(
    tmp_path: Path, whole: Path, first: list[str], then: list[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(config_of(*first), run, [Signals(signal.SIGTERM, 5)])
    train(config_of(*then, "run.resume=true"), run)
    book = read_ledger(run / "ledger.jsonl")
    assert (len(book.headers), len(book.releases)) == (1, 8)
    torch.testing.assert_close(weights(run), weights(whole), rtol=1e-4, atol=1e-4)  # sums round otherwise


def test_a_process_that_is_killed_while_it_claims_a_folder_leaves_no_half_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt  # nothing more is done, as after a SIGKILL

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_folder(Run(RunFolder(tmp_path), config_of()))
    assert not (tmp_path / "config.yaml").exists()
