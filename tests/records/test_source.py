"""The seam: a source of records of forty lines trains under every strategy, with ledger, budget and resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.events import UNITS, effective_noise_multiplier
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.releases import ReleaseEngine, TrainableParameters
from dpbench.records.source import Piece, RecordSource
from dpbench.records.training import Training, TrainingStep
from dpbench.strategies import (
    DPSGD,
)
from tests.strategies.recipes import EVERY, Make
from tests.strategies.worlds import loader_of, trainer_for, weights_of

STRATEGIES = {
    "metrics": partial(DPSGD, metrics={"length": 2.0}),
    **{name: EVERY[name] for name in ("quantile", "mean", "clip_only")},
}


class TwoTensors:
    """A record is two fixed tensors, whatever the network: its gradient."""

    summands = UNITS
    unit: str | None = None
    module: nn.Module

    def check(self, training: Training) -> None: ...

    def attach(self, training: Training, part: nn.Module, releases: ReleaseEngine) -> TrainableParameters:
        self.module, self.releases = part, releases
        names, parameters = zip(*part.named_parameters(), strict=True)
        return TrainableParameters(parameters, names)

    def step(self, own: TrainingStep) -> TrainingStep:
        return self.accumulate

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None: ...

    def begin(self, loader: PrivateDataLoader) -> None: ...

    def open_lot(self, batch: Any) -> None: ...

    def accumulate(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        gradients = [InstantiatedGradients(lambda x=x: x) for x in batch]
        self.releases.accumulate(gradients, len(batch[0]), values={"length": batch[1].norm(dim=1)})
        return torch.zeros((), requires_grad=True)

    def close_lot(self) -> None: ...

    def on_noise(self, generator: torch.Generator) -> Piece:
        shapes = [p.shape for p in self.module.parameters()]
        noise = [torch.randn(8, *shape, generator=generator) for shape in shapes]
        return Piece([InstantiatedGradients(lambda x=x: x) for x in noise], 8, None)

    def detach(self) -> None: ...


class Empty(pl.LightningModule):
    """Two parameters and no training step: the source has one."""

    record_metrics = {"length": 1}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for p in self.parameters():
            nn.init.zeros_(p)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("the source takes its place")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)


def tensors(size: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(size, 2, 3, generator=generator), torch.randn(size, 2, generator=generator))


def fit(folder: Path, make: Make, steps: int, start: str | None = None, **options: Any) -> tuple[pl.Trainer, Any, Any]:
    source, module = TwoTensors(), Empty()
    strategy = make(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, "records": source, **options})
    trainer = trainer_for(folder, strategy, steps)
    trainer.fit(module, loader_of(tensors(), 8), ckpt_path=start, weights_only=False)
    return trainer, module, strategy


def test_it_is_a_source() -> None:
    assert isinstance(TwoTensors(), RecordSource)


def test_the_update_is_the_mean_of_clipped_records(tmp_path: Path) -> None:
    _, module, _ = fit(tmp_path, DPSGD, 1, noise_multiplier=1e-9)
    loader = loader_of(tensors(), 8)
    lot = loader.lots.lot(0)
    rows = torch.cat([part[lot].flatten(1) for part in tensors().tensors], 1)
    wanted = (rows / rows.norm(dim=1, keepdim=True).clamp(min=1)).sum(0) / 8
    torch.testing.assert_close(weights_of(module), -wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_ledger_and_resume_under_every_strategy(tmp_path: Path, name: str) -> None:
    make = STRATEGIES[name]
    _, whole, strategy = fit(tmp_path / "whole", make, 4)
    trainer, _, _ = fit(tmp_path / "parts", make, 2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, again = fit(tmp_path / "parts", make, 4, str(tmp_path / "half.ckpt"))
    assert torch.equal(weights_of(whole), weights_of(resumed)) and weights_of(whole).abs().sum() > 0
    assert "training_step" not in whole.__dict__ and strategy.releases == 4
    if not strategy.private:
        assert not (tmp_path / "whole/ledger.jsonl").exists()
        return
    ledger = read_ledger(tmp_path / "parts/ledger.jsonl")
    assert [release.number for _, release in ledger.releases] == list(range(4))
    assert all(effective_noise_multiplier(one.queries) == pytest.approx(1.0) for _, one in ledger.releases)
    assert ledger_epsilon(ledger, 1e-3) == strategy.epsilon() == again.epsilon()


def test_a_budget_stops_it(tmp_path: Path) -> None:
    trainer, _, strategy = fit(tmp_path, DPSGD, 50, target_epsilon=4.0)
    assert 1 <= trainer.global_step == strategy.releases < 50 and strategy.epsilon() <= 4.0


def test_options_of_examples_are_refused() -> None:
    options: dict[str, Any] = {"microbatch_size": 2, "max_physical_batch_size": 3, "loss_reduction": "sum"}
    for name, value in options.items():
        with pytest.raises(ConfigurationError, match=f"{name} applies to records made of examples"):
            DPSGD(noise_multiplier=1.0, records=TwoTensors(), **{name: value})


def test_only_a_source_is_taken() -> None:
    with pytest.raises(ConfigurationError, match="records must be a source of records, an object .*, or null"):
        DPSGD(noise_multiplier=1.0, records="users")  # type: ignore[arg-type]
