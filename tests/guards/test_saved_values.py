"""Nothing of a lot may be written into hyperparameters, or into what optimizers and schedules hold."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
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
Adam: Any = torch.optim.Adam


@dataclass
class Facts:
    mean: float = 0.0
    rows: list[float] = field(default_factory=list)


class Writing(Classifier):
    """Calls `write(self, number)` with a number of the batch, in the hook that `where` names."""

    def __init__(self, write: Callable[[Any, float], Any], where: str = "step", make: Any = None) -> None:
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
        self.write, self.where, self.lots = write, where, 0
        self.make = make or (lambda params: Adam(params, lr=0.1))
        self.net[0].register_full_backward_hook(self._in_backward)

    def _look(self, where: str, number: Any) -> None:
        if self.where == where and self.lots > 1:
            self.write(self, float(number))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lots += 1
        self._look("step", batch[0].mean())
        return super().training_step(batch, batch_idx)

    def _in_backward(self, _: Any, __: Any, gradients: Any) -> None:
        self._look("backward", gradients[0].sum())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._look("start", batch[0].mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._look("end", outputs["loss"])

    def optimizer(self) -> Any:
        return self.optimizers(use_pl_optimizer=False)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def first_state(module: Any) -> Any:
    return next(iter(module.optimizer().state.values()))


WRITES: dict[str, tuple[Callable[[Any, float], Any], str]] = {
    "new hyperparameter": (lambda m, x: m.hparams.update(last_loss=x), "hparams.last_loss"),
    "hyperparameter": (lambda m, x: setattr(m.hparams, "lr", x), "hparams.lr"),
    "count": (lambda m, x: m.hparams.update(classes=int(x * 100)), "hparams.classes"),
    "text": (lambda m, x: m.hparams.update(text=f"{x:.3f}"), "hparams.text"),
    "list": (lambda m, x: m.hparams.nested["rows"].append(x), "hparams.nested.rows"),
    "in a list": (lambda m, x: m.hparams.nested["rows"].__setitem__(0, x), r"hparams.nested.rows\[0\]"),
    "key": (lambda m, x: m.hparams.nested.update({x: m.hparams.nested.pop(0.5, "key")}), r"hparams.nested\[2\]"),
    "dataclass": (lambda m, x: setattr(m.hparams.nested["facts"], "mean", x), "hparams.nested.facts.mean"),
    "in a dataclass": (lambda m, x: m.hparams.nested["facts"].rows.append(x), "hparams.nested.facts.rows"),
    "namespace": (lambda m, x: setattr(m.hparams.options, "mean", x), "hparams.options.mean"),
    "array": (lambda m, x: m.hparams.array.__setitem__(0, x), "hparams.array"),
    "tensor": (lambda m, x: m.hparams.tensor.fill_(x), "hparams.tensor"),
    "network": (lambda m, x: nn.init.constant_(m.hparams.network.weight, x), r"hparams.network"),
    "learning rate": (lambda m, x: m.optimizer().param_groups[0].update(lr=x), r"param_groups\[0\].lr"),
    "decay": (lambda m, x: m.optimizer().param_groups[0].update(weight_decay=x), r"param_groups\[0\].weight_decay"),
    "betas": (lambda m, x: m.optimizer().param_groups[0].update(betas=(x, 0.9)), r"param_groups\[0\].betas"),
    "flag": (lambda m, x: m.optimizer().param_groups[0].update(maximize=x < 1e9), r"param_groups\[0\].maximize"),
    "new option": (lambda m, x: m.optimizer().param_groups[0].update(loss=x), r"param_groups\[0\].loss"),
    "state": (lambda m, x: first_state(m)["exp_avg"].add_(x), r"optimizer.state\[0\].exp_avg"),
    "new state": (lambda m, x: first_state(m).update(hessian=torch.tensor(x)), r"optimizer.state\[0\].hessian"),
    "replaced state": (lambda m, x: first_state(m).update(exp_avg=torch.tensor(x)), r"optimizer.state\[0\].exp_avg"),
    "number in a state": (lambda m, x: first_state(m).update(loss=x), r"optimizer.state\[0\].loss"),
    "list in a state": (lambda m, x: first_state(m).update(loss=[torch.tensor(x)]), r"optimizer.state\[0\].loss"),
    "attribute": (lambda m, x: setattr(m.optimizer(), "loss", x), "optimizer.loss"),
    "attribute of a base": (lambda m, x: setattr(m.optimizer(), "inner", SimpleNamespace(x=x)), "optimizer.inner"),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_step_writes_nothing_that_is_saved(tmp_path: Path, name: str) -> None:
    write, words = WRITES[name]
    with pytest.raises(UnsupportedModuleError, match=f"forward pass changes .*{words}"):
        fit(tmp_path, Writing(write))


@pytest.mark.parametrize("name", ["new hyperparameter", "learning rate", "state", "number in a state"])
@pytest.mark.parametrize("where", ["start", "backward", "end"])
def test_nor_does_a_hook(tmp_path: Path, where: str, name: str) -> None:
    write, words = WRITES[name]
    module = Writing(write, where)
    if where == "start" and name == "new hyperparameter":  # put back at once
        fit(tmp_path, module)
        assert "last_loss" not in module.hparams
        return
    with pytest.raises(UnsupportedModuleError, match=words):
        fit(tmp_path, module)


def test_nor_a_data_module(tmp_path: Path) -> None:
    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"size": 12})

        def train_dataloader(self) -> Any:
            return loader_of(pictures())

    module = Writing(lambda m, x: m.trainer.datamodule.hparams.update(mean=x))
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
    def __init__(self, schedule: Callable[[Any], Any], manual: bool = False, first: bool = False) -> None:
        super().__init__(manual)
        self.schedule, self.first = schedule, first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic_optimization and self.first:
            self.lr_schedulers().step()
        output = super().training_step(batch, batch_idx)
        if not self.automatic_optimization and not self.first:
            self.lr_schedulers().step()
        return output

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


rates = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda o: rates.StepLR(o, 2, 0.5),
    "cosine": lambda o: rates.CosineAnnealingLR(o, 6),
    "function": lambda o: rates.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cycle": lambda o: rates.OneCycleLR(o, 0.5, total_steps=40),
    "sequence": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o, 0.5, 2), rates.ExponentialLR(o, 0.9)], [2]),
    "chain": lambda o: rates.ChainedScheduler([rates.LinearLR(o), rates.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("manual", ["automatic", "manual", "manual, before"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_move_options(tmp_path: Path, name: str, manual: str) -> None:
    module = Scheduled(SCHEDULES[name], manual != "automatic", manual == "manual, before")
    fit(tmp_path, module)
    group = module.optimizers(use_pl_optimizer=False).param_groups[0]
    assert (group["lr"], group["momentum"]) != (0.1, 0.9)


def test_a_schedule_is_no_cover(tmp_path: Path) -> None:
    class Covered(Scheduled):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.optimizers(use_pl_optimizer=False).param_groups[0][self.option] = float(outputs["loss"])

        option = "lr"

    for option in ("lr", "weight_decay"):
        module = Covered(SCHEDULES["steps"])
        module.option = option
        with pytest.raises(UnsupportedModuleError, match=option):
            fit(tmp_path / option, module)


class Warm(Classifier):
    """As Lightning's documentation does it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 500) * 0.5


class BeforeZeroGrad(Classifier):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.5 / (self.trainer.global_step + 1)


class Counting(torch.optim.SGD):
    """Writes before it calls the closure."""

    steps, rates = 0, ()

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.rates = (*self.rates, self.param_groups[0]["lr"])
        self.param_groups[0]["k"] = self.steps
        for p in self.param_groups[0]["params"]:
            self.state[p]["ahead"] = p.detach().clone()
            with torch.no_grad():
                p.mul_(0.99)
        return super().step(closure)


class Ahead(Classifier):
    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.1)


@pytest.mark.parametrize("module", [Warm, BeforeZeroGrad, Ahead])
def test_what_sees_no_record_may_write(tmp_path: Path, module: type[Classifier]) -> None:
    fit(tmp_path, module())


def test_values_that_are_no_numbers_equal_themselves() -> None:
    module = Classifier()
    module.save_hyperparameters({"nan": float("nan"), "list": [float("nan")], "self": []})
    module.hparams["self"].append(module.hparams["self"])
    optimizer = torch.optim.SGD(module.parameters(), lr=float("nan"))
    saved = Saved(plain_training(module, optimizer))
    assert saved.written() == []
    module.hparams["list"][0] = 0.0
    assert saved.written() == ["hparams.list[0]"]
