"""What a step has computed of records is out of the sight of optimizers, their hooks and schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import TensorDataset

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, trainer_for


class Keeps(pl.LightningModule):
    """Keeps its last loss, as a tensor or as a number."""

    def __init__(self, as_number: bool) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.as_number = as_number
        self.last: Any = 0.0 if as_number else torch.zeros(())
        self.shown: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.last = loss.item() if self.as_number else loss.detach()
        return loss

    def rate(self) -> float:
        return 0.01 / (1 + float(self.last))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Schedule(Keeps):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rate())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class PreHook(Keeps):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=self.rate()))
        return optimizer


class Decay(torch.optim.Adam):
    """Weight decay by the loss."""

    module: list[Keeps]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data.mul_(1 - 1e-3 * self.module[0].last)
        return loss


class OwnOptimizer(Keeps):
    def configure_optimizers(self) -> Any:
        optimizer = Decay(self.parameters(), lr=0.01)
        optimizer.module = [self]
        return optimizer


class Callback(pl.Callback):
    observes_only = True

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = pl_module.rate()


class OfCallback(Keeps):
    def configure_callbacks(self) -> Any:
        return [Callback()]


class OwnStep(Keeps):
    """Lets the learning rate follow the loss, after the update."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.param_groups[0]["lr"] = self.rate()


class EpochEnd(Keeps):
    def on_train_epoch_end(self) -> None:
        self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"] = self.rate()


class Shows(Schedule):
    """A healthy schedule, and a loss that is only looked at."""

    def rate(self) -> float:
        return 0.01

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(float(self.last))

    def on_train_epoch_end(self) -> None:
        self.log("last", float(self.last))


def fit(folder: Path, module: Keeps) -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer_for(folder, strategy, 4).fit(module, loader_of(TensorDataset(x, torch.arange(40) % 3), 16))


@pytest.mark.parametrize(
    ("kind", "as_number"),
    [
        (Schedule, True),
        (PreHook, False),
        (OwnOptimizer, False),
        (OwnStep, True),
        (OfCallback, True),
    ],
)
def test_an_update_that_reads_records_is_refused(tmp_path: Path, kind: type[Keeps], as_number: bool) -> None:
    words = "uses last, which training_step set" if as_number else "reads a tensor that training_step computed"
    with pytest.raises(ConfigurationError, match=words):
        fit(tmp_path, kind(as_number))
    assert not _get_current_function_mode_stack()


def test_a_hook_of_an_epoch_that_reads_records_may_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"lr changed in an epoch hook .* computed from records"):
        fit(tmp_path / "tensor", EpochEnd(as_number=False))
    module = EpochEnd(as_number=True)
    fit(tmp_path / "number", module)
    assert module.optimizers(use_pl_optimizer=False).param_groups[0]["lr"] == 0.01  # of the number before the step


def test_what_is_only_looked_at(tmp_path: Path) -> None:
    """As a tensor it is there; a number is as it was before the step, in which it was read."""
    module = Shows(as_number=False)
    fit(tmp_path / "tensor", module)
    assert len(set(module.shown)) == 4
    module = Shows(as_number=True)
    fit(tmp_path / "number", module)
    assert module.shown == [0.0] * 4
