"""Nothing of a lot may be written into hyperparameters, or into what optimizers and schedules hold."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from dpbench import PrivateLoop
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._saved import Saved
from dpbench.strategies import DPSGD
from tests.guards.plain_training import plain_training
from tests.guards.test_module_writes import fit
from tests.strategies.worlds import Classifier, loader_of, pictures

pytestmark = [
    pytest.mark.filterwarnings("ignore:Attribute 'network' is an instance of:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


@dataclass
class Facts:
    mean: float = 0.0


class Holding(Classifier):
    """Has hyperparameters of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(
            {
                "lr": 0.1,
                "nested": {"rows": [0.0], "facts": Facts(), 0.5: "key"},
                "options": Namespace(mean=0.0),
                "array": np.zeros(2),
                "tensor": torch.zeros(2),
                "network": nn.Linear(2, 2),
            }
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def first_state(optimizer: Any) -> Any:
    return next(iter(optimizer.state.values()))


Write = Callable[[Any, Any, float], Any]

WRITES: dict[str, Write] = {
    "hparams.last_loss": lambda m, o, x: m.hparams.update(last_loss=x),
    "hparams.nested.rows[2]": lambda m, o, x: m.hparams.nested["rows"].append(x),
    "hparams.nested[2]": lambda m, o, x: m.hparams.nested.update({x: m.hparams.nested.pop(0.5)}),
    "hparams.nested.facts.mean": lambda m, o, x: setattr(m.hparams.nested["facts"], "mean", x),
    "hparams.options.mean": lambda m, o, x: setattr(m.hparams.options, "mean", x),
    "hparams.array": lambda m, o, x: m.hparams.array.fill(x),
    "hparams.tensor": lambda m, o, x: m.hparams.tensor.fill_(x),
    "hparams.network[0]": lambda m, o, x: nn.init.constant_(m.hparams.network.weight, x),
    "optimizer.param_groups[0].lr": lambda m, o, x: o.param_groups[0].update(lr=x),
    "optimizer.state[0].exp_avg": lambda m, o, x: first_state(o)["exp_avg"].add_(x),
    "optimizer.state[0].hessian": lambda m, o, x: first_state(o).update(hessian=torch.tensor(x)),
    "optimizer.state[0].losses": lambda m, o, x: first_state(o).update(losses=[torch.tensor(x)]),
    "optimizer.loss": lambda m, o, x: setattr(o, "loss", x),
}
"""By the name under which they are refused."""


@pytest.mark.parametrize("name", WRITES)
def test_all_that_is_saved_is_compared(name: str) -> None:
    module = Holding()
    optimizer = module.configure_optimizers()
    module.loss(pictures(4).tensors).backward()
    optimizer.step()
    saved = Saved(plain_training(module, optimizer))
    assert not saved.written()
    WRITES[name](module, optimizer, 0.7)
    assert name in ", ".join(saved.written())


class Writing(Holding):
    """Calls a write with a number of the batch, in the hook that `where` names."""

    def __init__(self, write: Write, where: str) -> None:
        super().__init__()
        self.write, self.where, self.lots = write, where, 0
        self.net[0].register_full_backward_hook(lambda _, __, gradients: self._look("backward", gradients[0].sum()))

    def _look(self, where: str, number: Any) -> None:
        if self.where == where and self.lots > 1:
            self.write(self, self.optimizers(use_pl_optimizer=False), float(number))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lots += 1
        self._look("step", batch[0].mean())
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._look("start", batch[0].mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._look("end", outputs["loss"])


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        ("step", "optimizer.state[0].exp_avg", r"the forward pass .* changes optimizer.state\[0\].exp_avg"),
        ("start", "optimizer.state[0].hessian", r"optimizer.state\[0\].hessian"),
        ("backward", "optimizer.param_groups[0].lr", r"param_groups\[0\].lr"),
        ("end", "hparams.last_loss", "changed after the release"),
    ],
)
def test_a_step_writes_nothing_that_is_saved(tmp_path: Path, where: str, name: str, words: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=words):
        fit(tmp_path, Writing(WRITES[name], where), 3)


def test_hyperparameters_of_the_start_are_put_back(tmp_path: Path) -> None:
    module = Writing(WRITES["hparams.last_loss"], "start")
    fit(tmp_path, module, 3)
    assert "last_loss" not in module.hparams


def test_nor_a_data_module(tmp_path: Path) -> None:
    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"size": 12})

        def train_dataloader(self) -> Any:
            return loader_of(pictures())

    module = Writing(lambda m, o, x: m.trainer.datamodule.hparams.update(mean=x), "step")
    with pytest.raises(UnsupportedModuleError, match="datamodule.hparams.mean"):
        fit(tmp_path, module, loader=Data())


def test_nor_the_loss_function_of_a_loop(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(network: nn.Module, batch: Any) -> Any:
        value = nn.functional.cross_entropy(network(batch[0]), batch[1])
        optimizer.param_groups[0]["lr"] = value.item()
        return value

    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / "ledger.jsonl"))
    with pytest.raises(UnsupportedModuleError, match=r"param_groups\[0\].lr"):
        list(PrivateLoop(model, optimizer, loader_of(pictures()), strategy, loss, 3))


# ------------------------------------------------------------------------------------------------- healthy


class Scheduled(Classifier):
    def __init__(self, schedule: Callable[[Any], Any], manual: bool = False) -> None:
        super().__init__(manual)
        self.schedule = schedule

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic_optimization:
            self.lr_schedulers().step()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


rates = torch.optim.lr_scheduler


def halved(optimizer: Any) -> Any:
    return rates.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (lambda o: rates.OneCycleLR(o, 0.5, total_steps=40), {}),  # of momentum, too
        (halved, {"manual": True}),
    ],
    ids=["automatic", "manual"],
)
def test_schedules_move_options(tmp_path: Path, schedule: Any, options: dict[str, Any]) -> None:
    module = Scheduled(schedule, **options)
    fit(tmp_path, module, 3)
    group = module.optimizers(use_pl_optimizer=False).param_groups[0]
    assert (group["lr"], group["momentum"]) != (0.1, 0.9)


def test_a_schedule_is_no_cover(tmp_path: Path) -> None:
    class Covered(Scheduled):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"] = float(outputs["loss"])

    with pytest.raises(UnsupportedModuleError, match="lr"):
        fit(tmp_path, Covered(halved), 3)


class Warm(Classifier):
    """As Lightning's documentation does it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 500) * 0.5


class Ahead(Classifier):
    """Its optimizer writes before it calls the closure."""

    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            self.param_groups[0]["k"] = self.steps
            for p in self.param_groups[0]["params"]:
                self.state[p]["ahead"] = p.detach().clone()
                with torch.no_grad():
                    p.mul_(0.99)
            return super().step(closure)

    def configure_optimizers(self) -> Any:
        return self.Counting(self.parameters(), lr=0.1)


@pytest.mark.parametrize("module", [Warm, Ahead])
def test_what_sees_no_record_may_write(tmp_path: Path, module: type[Classifier]) -> None:
    fit(tmp_path, module(), 3)


def test_values_that_are_no_numbers_equal_themselves() -> None:
    module = Classifier()
    module.save_hyperparameters({"nan": float("nan"), "list": [float("nan")], "self": []})
    module.hparams["self"].append(module.hparams["self"])
    optimizer = torch.optim.SGD(module.parameters(), lr=float("nan"))
    saved = Saved(plain_training(module, optimizer))
    assert saved.written() == []
    module.hparams["list"][0] = 0.0
    assert saved.written() == ["hparams.list[0]"]
