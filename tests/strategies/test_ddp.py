"""Two gloo processes: the same lots, noise and weights as one."""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.randomness import Stream
from dpbench.records import examples
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, assert_same_training, loader_of, pictures, trainer_for, weights_of

TWO = {"devices": 2, "strategy": "ddp_fork"}
pytestmark = [
    pytest.mark.own_key,  # other processes take the keys that users get
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class NoiseOnEveryRank(DPSGD):
    """A broken mutant: each process adds its own noise."""

    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        others = self._releases
        if others.processes.rank:
            own, release = others.mechanism, others.release
            others.release = lambda: (own.add_noise(lambda _: others.key_of(Stream.NOISE)), release())[1]  # type: ignore[method-assign]


class SameLotOnEveryRank(DPSGD):
    """A broken mutant: every process takes the whole lot."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        loader: Any = trainer.train_dataloader
        mock.patch("torch.distributed.get_rank", return_value=0).start()
        mock.patch("torch.distributed.get_world_size", return_value=1).start()
        assert loader.lots is not None


class WatchesItsEnd(DPSGD):
    """Notes whether a process is still in its group when the interpreter ends: some then abort."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert self.ledger_path is not None
        note = self.ledger_path.with_name(f"end-{trainer.global_rank}")
        atexit.register(lambda: note.write_text(str(dist.is_initialized())))  # last come, first called
        super().setup(trainer, pl_module, stage)


def run(
    folder: Path,
    strategy: DPSGD,
    two: bool,
    manual: bool = False,
    expected: float = 12,
    start: str = "ddp_fork",
) -> torch.Tensor:
    torch.manual_seed(3)
    module = Classifier(manual)
    module.net[4] = nn.Identity()  # dropout masks belong to a position in a process
    trainer = trainer_for(folder, strategy, 8, **({**TWO, "strategy": start} if two else {}))
    trainer.fit(module, loader_of(pictures(), expected))
    return weights_of(module)


@pytest.mark.parametrize(
    ("manual", "expected", "start"),
    [
        pytest.param(False, 12, "ddp_spawn", id="auto"),  # forks have no end of an interpreter
        pytest.param(True, 12, "ddp_fork", id="manual"),
        pytest.param(False, 1, "ddp_fork", id="empty"),
    ],
)
@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path, manual: bool, expected: float, start: str) -> None:
    def watched(name: str) -> WatchesItsEnd:
        return WatchesItsEnd(noise_multiplier=1.0, seed=0, delta=1e-3, ledger=str(tmp_path / name / "ledger.jsonl"))

    one = run(tmp_path / "1", watched("1"), False, manual, expected)  # of the same class: it is part of the key
    two = run(tmp_path / "2", watched("2"), True, manual, expected, start)
    if start == "ddp_spawn":
        assert [(tmp_path / "2" / f"end-{rank}").read_text() for rank in (0, 1)] == ["False", "False"]
    assert_same_training(two, one, noise_std=1.0, expected_batch_size=expected)
    books = [read_ledger(tmp_path / name / "ledger.jsonl") for name in ("1", "2")]
    events = [[(r.number, r.sampling, r.queries) for _, r in book.releases] for book in books]
    assert events[0] == events[1]


@pytest.mark.slow
def test_two_processes_begin_a_batch_again_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is over on one of them; sums and sizes are those of the size from the start."""
    forward = nn.Linear.forward
    monkeypatch.setattr(examples, "_RAISES_WHEN_FULL", ("cuda", "cpu"))

    def over(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x)

    def trained(name: str, rows: Any) -> torch.Tensor:
        ledger = str(tmp_path / name / "ledger.jsonl")
        strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, max_physical_batch_size=rows, ledger=ledger)
        return run(tmp_path / name, strategy, True)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", over)
        auto = trained("auto", "auto")
    sizes = json.loads((tmp_path / "auto" / "piece_sizes.json").read_text())
    assert sizes == {"0": 1}
    assert torch.equal(auto, trained("given", 1))
    ledgers = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("auto", "given")]
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_noise_on_every_rank_does_not_agree(tmp_path: Path) -> None:
    one = run(tmp_path / "1", DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), False)
    two = run(tmp_path / "2", NoiseOnEveryRank(noise_multiplier=1.0, seed=0, delta=1e-3), True)
    assert float((one - two).norm()) > 1e-2 * float(one.norm())


@pytest.mark.slow
def test_the_same_lot_on_every_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"rows but \d+ records"):
        run(tmp_path, SameLotOnEveryRank(noise_multiplier=1.0, seed=0, delta=1e-3), True)


@pytest.mark.slow
def test_system_entropy_and_budget_on_two_processes(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, target_epsilon=2.0, delta=1e-3)
    torch.manual_seed(3)
    trainer = trainer_for(tmp_path, strategy, 200, **TWO)
    trainer.fit(Classifier(), loader_of(pictures(), seed=None))
    releases = len(read_ledger(tmp_path / "ledger.jsonl").releases)
    assert 0 < releases < 200


def test_who_started_processes_saves_no_checkpoint(tmp_path: Path) -> None:
    """It has the weights, but not what was released: a run that goes on from there would begin at zero."""
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=1e-3), 2, devices=2, strategy="ddp_fork")
    trainer.fit(Classifier(), loader_of(pictures()))
    with pytest.raises(ConfigurationError, match=r"did not train.*ModelCheckpoint"):
        trainer.save_checkpoint(tmp_path / "all.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert not (tmp_path / "all.ckpt").exists() and (tmp_path / "weights.ckpt").exists()


@pytest.mark.slow
def test_lightnings_own_sampler_is_refused(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer = trainer_for(tmp_path, strategy, 4, **TWO, use_distributed_sampler=True)
    with pytest.raises(Exception, match="use_distributed_sampler=False|sampler draws from|sampling"):
        trainer.fit(Classifier(), loader_of(pictures()))
