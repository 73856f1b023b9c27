"""Which method computes the gradients is found out on the first lot with records, before anything is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench.callback.lightning_training import LightningTraining
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.guards.engine_trial import EngineTrial
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD, AdaptiveMeanClipping, ClipOnly
from tests.strategies.worlds import loader_of, trainer_for
from tests.support.one_by_one import (
    NETWORKS,
    Module,
    assert_releases_autograd,
    cross_entropy,
    data,
    fit,
    loop_of,
    plain,
    used,
)

BOUND = 0.3
ALONE = ("routing", "gradient penalty")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a training says on Lightning's logger, whose level is INFO: where users see it."""
    said: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: said.append(text))
    monkeypatch.setattr("dpbench.callback.loop.log_line", said.append)
    return said


@pytest.mark.parametrize("name", ["keywords and tuples", "lasso", *ALONE])
def test_each_network_trains_and_is_right(tmp_path: Path, name: str, lines: list[str]) -> None:
    make, step = NETWORKS[name]
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, make(), step, strategy)
    is_known = name not in ALONE
    assert used(strategy) == ("engine" if is_known else "one_by_one")
    said = [line for line in lines if "gradients=auto" in line]
    assert len(said) == int(not is_known) and not any("off by" in line for line in said)


def test_a_loop_says_so_too(tmp_path: Path, lines: list[str]) -> None:
    make, step = NETWORKS["routing"]
    list(loop_of(tmp_path, make(), step, gradients="auto"))
    assert any(line.startswith("gradients=auto: record by record") for line in lines)


class WithNoise(Module):
    def noise_batch(self, size: int, generator: torch.Generator) -> Any:
        return torch.randn(size, 5, 6, generator=generator), torch.arange(size) % 4


def first_bounds(folder: Path, name: str, gradients: Any) -> list[float]:
    torch.manual_seed(1)
    make, step = NETWORKS[name]
    strategy = AdaptiveMeanClipping(noise_multiplier=1.0, delta=1e-3, seed=1, gradients=gradients)
    trainer_for(folder, strategy, 1).fit(WithNoise(make(), step), loader_of(data(40), 10))
    return [group.max_grad_norm for group in strategy.mechanism.training_plan.groups]


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("name", ["keywords and tuples", "routing"])
def test_first_bounds_on_noise_are_those_of_autograd(tmp_path: Path, name: str) -> None:
    """They are found before the first lot, and so before the method is chosen."""
    bounds = first_bounds(tmp_path / "alone", name, "one_by_one")
    assert min(bounds) > 1e-3
    assert first_bounds(tmp_path / "auto", name, "auto") == pytest.approx(bounds, rel=1e-3)


@pytest.mark.usefixtures("one_key")
def test_it_is_the_engine_to_the_bit(tmp_path: Path) -> None:
    """Where the engine knows the network: the trial leaves no trace, dropout included."""
    weights = []
    for gradients in ("engine", "auto"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(30, 4))
        strategy, released, _ = fit(tmp_path / gradients, net, gradients=gradients)
        weights.append(released)
    assert torch.equal(weights[0], weights[1]) and used(strategy) == "engine"


def test_a_first_lot_of_which_nothing_can_be_said(tmp_path: Path) -> None:
    """No record of it has a finite gradient: the engine is tried again on the next one."""

    class Diverging(Module):
        lot = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if self.lot < 2 else 1.0)

    class First(pl.Callback):
        """Before the strategy opens a lot, the module knows which it is."""

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            module.lot = batch_idx

    make, step = NETWORKS["routing"]
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1)
    trainer = trainer_for(tmp_path, First(), 4, more=[strategy])
    with pytest.warns(UserWarning, match="no record of a batch has a finite gradient"):
        trainer.fit(Diverging(make(), step), loader_of(data(40), 10))
    assert used(strategy) == "one_by_one" and strategy.releases == 4


def test_first_lots_without_records_and_of_one(tmp_path: Path) -> None:
    make, _ = NETWORKS["routing"]
    strategy, weights, _ = fit(tmp_path, make(), steps=4, gradients="auto", loader=loader_of(data(40), 1))
    assert weights.isfinite().all() and used(strategy) == "one_by_one"
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 4


def test_an_interrupted_run_goes_on_by_the_same_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another trial, whatever its first lot would say."""

    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Dropout(0.3), NETWORKS["routing"][0]())

    _, whole, _ = fit(tmp_path / "whole", net(), steps=4, gradients="auto")
    _, _, half = fit(tmp_path / "half", net(), steps=2, gradients="auto")
    half.save_checkpoint(tmp_path / "half.ckpt")
    monkeypatch.delattr(EngineTrial, "limit")
    strategy, resumed, _ = fit(tmp_path / "half", net(), steps=4, gradients="auto", start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed) and used(strategy) == "one_by_one"


def test_a_step_that_fails_says_so_itself(tmp_path: Path) -> None:
    def broken(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[2])

    with pytest.raises(IndexError):
        fit(tmp_path, plain(), step=broken, gradients="auto")


def test_logs_and_states_of_the_trial(tmp_path: Path) -> None:
    """Nothing of it is logged, and the module is as it was."""
    found: list[float] = []

    class Logging(Module):
        seen = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("train/loss", 1.0)
            self.seen += 0.5
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            found.append(self.seen)

    loader = PrivateDataLoader(data(), PrivateBatchSampler(make_sampling("full", 12, 12), None))
    trainer_for(tmp_path, ClipOnly(max_grad_norm=BOUND), 1).fit(Logging(plain(), cross_entropy), loader)
    assert found == [0.5]
