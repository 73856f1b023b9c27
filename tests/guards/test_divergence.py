"""Diverged trainings: lots without gradients are told, and only what was released stops a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench import PrivateLoop
from dpbench.errors import Diverged
from dpbench.guards.divergence import refuse_diverged
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD, ClipOnly
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:no record of a batch has a finite gradient:UserWarning"),
    pytest.mark.filterwarnings("ignore:updates of some users are not finite:UserWarning"),
]
STOPS = r"released weights have diverged \(.*\), so the training stops after (\d+) releases, which cost epsilon = "


class Wild(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e30)


def fit(folder: Path, module: pl.LightningModule, steps: int = 8, data: Any = None, **options: Any) -> DPSGD:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, fingerprint="one")
    start = options.pop("start", None)
    trainer = trainer_for(folder, strategy, steps, log_every_n_steps=2, **options)
    trainer.fit(module, loader_of(data or pictures()), ckpt_path=start, weights_only=False)
    return strategy


def test_released_weights_stop_a_run(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=STOPS) as caught:
        fit(tmp_path, Wild(manual=True))
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger.damage is None and len(ledger.releases) == 2
    epsilon = ledger_epsilon(ledger, 1e-3)
    assert f"epsilon = {epsilon:.4g} at delta = 0.001 ({tmp_path / 'ledger.jsonl'})" in str(caught.value)
    assert "lower the learning rate" in str(caught.value) and "\n" not in str(caught.value)


def test_a_loop_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / "ledger.jsonl"))
    optimizer = torch.optim.SGD(model.parameters(), 1e30)
    loop = PrivateLoop(model, optimizer, loader_of(pictures()), strategy, loss, 3)
    with pytest.raises(Diverged, match=STOPS):
        list(loop)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 3 and not loop._loader.lots.in_use


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_both_networks_of_a_pair(tmp_path: Path) -> None:
    class Pair(Classifier):
        private_module = "net"

        def __init__(self) -> None:
            super().__init__(manual=True)
            self.other = nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            private, public = self.optimizers()
            self.manual_backward(self.loss(batch))
            private.step()
            self.other(torch.ones(1, 2)).sum().backward()
            public.optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.other.parameters(), 1e30)]

    with pytest.raises(Diverged, match=r"diverged \(other.weight\)"):
        fit(tmp_path, Pair())


def test_a_resumed_run_says_the_same(tmp_path: Path) -> None:
    class Save(pl.Callback):
        observes_only = True

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "first.ckpt")

    with pytest.raises(Diverged, match=STOPS) as first:
        fit(tmp_path, Wild(), more=[Save()])
    with pytest.raises(Diverged, match=STOPS) as again:
        fit(tmp_path, Wild(), start=tmp_path / "first.ckpt")
    assert str(first.value) == str(again.value)
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 2


def broken(share: float) -> TensorDataset:
    images, labels = pictures().tensors
    images = images.clone()
    images[: round(share * len(images))] = float("nan")
    return TensorDataset(images, labels)


def test_lots_without_gradients_are_told_once_and_stop_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = fit(tmp_path, Classifier(), 3, broken(1.0))
    told = [w for w in caught if "no record of a batch has a finite gradient" in str(w.message)]
    assert strategy.releases == 3 and len(told) == 1
    assert strategy.mechanism.records_of_lot[0] > 0 and strategy.mechanism.records_of_lot[1] == 0


def test_records_without_a_gradient_are_counted_as_not_private(tmp_path: Path) -> None:
    seen: list[float] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append(float(trainer.callback_metrics.get("nonprivate/nonfinite_records", -1)))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*finite.*")  # a lot with others is nothing to tell
        strategy = fit(tmp_path, Classifier(), 3, data=broken(0.2), more=[Look()])
        assert strategy.releases == 3 and max(seen) > 0
        fit(tmp_path / "healthy", Classifier(), 3, more=[Look()])
    assert seen[-3:] == [-1] * 3


def test_references_stop_too(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, ClipOnly(noise_multiplier=1.0), 8, log_every_n_steps=2)
    with pytest.raises(Diverged, match="diverged .* after 2 steps: lower the learning rate"):
        trainer.fit(Wild(), loader_of(pictures()))


def test_large_weights_train() -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, 1e9)
    refuse_diverged(module, None)  # type: ignore[arg-type]
