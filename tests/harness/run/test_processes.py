"""Several processes end well: errors are told in one line, and a process that dies loses nothing that was finished.

Forked processes start at once; what the end of the interpreter does needs spawned ones (tests/strategies/test_ddp.py).
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from dpbench.errors import ConfigurationError, DPBenchError, Interrupted, WorkerDied
from dpbench.harness.run._resume import prepare_folder
from dpbench.harness.run.train import train
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.processes import TWO, config_of
from tests.support.signalled import Signals


class Dies(pl.Callback):
    """Kills one process with a signal, in the middle or when everything is done."""

    def __init__(self, rank: int, step: int, number: int = signal.SIGKILL) -> None:
        self._rank, self._step, self._number = rank, step, number

    def _die(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank == self._rank and trainer.world_size > 1:
            signal.signal(self._number, signal.SIG_DFL) if self._number != signal.SIGKILL else None
            os.kill(os.getpid(), self._number)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            self._die(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._step < 0:
            self._die(trainer)


class Raises(pl.Callback):
    """An error in one process, while the other waits for it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            raise self._error


def metrics_of(run: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((run / "result.json").read_text())["metrics"]
    return metrics


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(config_of(*TWO), run)
    return run


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_process_that_aborts_at_its_end_loses_nothing(tmp_path: Path, whole: Path, rank: int) -> None:
    """The first one is then to evaluate: where it aborts, a resume does that alone."""
    dies = [Dies(rank, -1, signal.SIGABRT)]
    if rank == 0:
        with pytest.raises(WorkerDied, match="process 0 of 2 .* died .*SIGABRT.*continue with: dpbench resume"):
            train(config_of(*TWO), tmp_path / "run", dies)
        train(config_of(*TWO, "run.resume=true"), tmp_path / "run")
    else:
        with pytest.warns(UserWarning, match="process 1 of 2 .* died .*SIGABRT.*: nothing is lost"):
            train(config_of(*TWO), tmp_path / "run", dies)
    assert metrics_of(tmp_path / "run") == metrics_of(whole)
    for name in ("ledger.jsonl", "metrics.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_in_mid_run_is_one_line(tmp_path: Path, whole: Path, rank: int) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        WorkerDied, match=f"process {rank} of 2 .* died .*SIGKILL.*continue with: dpbench resume"
    ) as caught:
        train(config_of(*TWO), run, [Dies(rank, 5)])
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, DPBenchError)
    assert not (run / "result.json").exists()
    assert len(read_ledger(run / "ledger.jsonl").releases) >= 5
    (run / ".metrics.csv.4711").touch()
    train(config_of(*TWO, "run.resume=true"), run)
    assert not (run / ".metrics.csv.4711").exists()
    assert metrics_of(run) == metrics_of(whole)
    assert (run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()


@pytest.mark.parametrize("error", [ConfigurationError("wrong."), PermissionError(13, "Permission denied")], ids=repr)
def test_an_error_of_another_process_comes_out_as_it_was(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])) as caught:
        train(config_of(*TWO), tmp_path / "run", [Raises(error)])
    assert caught.value.args == error.args


def test_the_evaluation_runs_on_one_process_at_the_last_step(whole: Path, tmp_path: Path) -> None:
    train(config_of(), tmp_path / "run")
    alone, two = (json.loads((run / "result.json").read_text()) for run in (tmp_path / "run", whole))
    assert two["metrics"]["test/accuracy"] == pytest.approx(alone["metrics"]["test/accuracy"], abs=0.01)
    rows = [(run / "metrics.csv").read_text().splitlines() for run in (tmp_path / "run", whole)]
    assert [row.split(",")[0] for row in rows[0]] == [row.split(",")[0] for row in rows[1]]
    assert [row.count(",,") for row in rows[0]] == [row.count(",,") for row in rows[1]]


@pytest.mark.parametrize(("first", "then"), [(TWO, []), ([], TWO)], ids=["2-1", "1-2"])
def test_a_run_goes_on_with_another_number_of_processes(
    tmp_path: Path, whole: Path, first: list[str], then: list[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(config_of(*first), run, [Signals(signal.SIGTERM, 5)])
    train(config_of(*then, "run.resume=true"), run)
    books = [read_ledger(place / "ledger.jsonl") for place in (run, whole)]
    assert [(len(book.headers), len(book.releases)) for book in books] == [(1, 8)] * 2
    states = [torch.load(RunFolder(one).checkpoint, weights_only=False)["state_dict"] for one in (run, whole)]
    for name, weight in states[0].items():  # the same lots and noise; sums round otherwise
        torch.testing.assert_close(weight, states[1][name], rtol=1e-4, atol=1e-4)


def test_a_release_that_other_processes_round_otherwise_gets_new_noise(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(WorkerDied):
        train(config_of(*TWO), run, [Dies(1, 5)])
    ahead = len(read_ledger(run / "ledger.jsonl").releases)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(config_of("run.resume=true"), run)
    ledger = read_ledger(run / "ledger.jsonl")
    other = any("differs from its record" in str(one.message) for one in caught)
    # On their grid most sums are the same again; one that is not goes on in a new phase.
    assert len(ledger.headers) == (2 if other else 1) and len(ledger.releases) >= ahead
    assert max(release.number for _, release in ledger.releases) == 7


def test_a_process_that_is_killed_while_it_claims_a_folder_leaves_no_half_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt  # nothing more is done, as after a SIGKILL

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_folder(Run(RunFolder(tmp_path), config_of()))
    assert not (tmp_path / "config.yaml").exists()
