"""Trainings of steps whose records depend on one another, and of healthy ones, which nothing changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.loop import PrivateLoop
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._number_of_records import NumberOfRecords
from dpbench.privacy.gradients import tf32
from dpbench.strategies import DPSGD
from tests.strategies import worlds
from tests.strategies.worlds import loader_of, update, weights_of

MIXED = "records are combined in|belong to no single record"
LossOf = Callable[["Net", Tensor, Tensor], Tensor]


class Net(pl.LightningModule):
    """A small network with a loss that a test gives."""

    def __init__(self, loss: LossOf, inside: nn.Module | None = None, manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), inside or nn.Tanh(), nn.Linear(8, 3))
        self.loss = loss
        self.automatic_optimization = not manual
        self.calls = 0
        self.rng = np.random.default_rng(1)
        self.drawn = torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return update(self, self.loss(self, *batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator))


def fit(folder: Path, module: pl.LightningModule, steps: int = 2, data: Any = None, **options: Any) -> DPSGD:
    return worlds.fit(folder, module, steps, loader=loader_of(data or records(), 16), **options)


engine = partial(fit, gradients="engine")


def each(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, reduction="none")


def mean(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).mean()


def total(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).sum()


# ------------------------------------------------------------------------------------------------- coupled


def centered(module: Net, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x - x.mean(0), y)


class NormalizedGradient(nn.Module):
    """A hook that divides the gradient of an activation by its norm over the lot."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: grad / grad.norm())
        return x


def test_a_hook_that_couples_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        engine(tmp_path, Net(mean, NormalizedGradient(), manual=True), 10)


def test_a_loop_is_watched_alike(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0] / batch[0].max()), batch[1])

    ledger = str(tmp_path / "ledger.jsonl")
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, gradients="engine", ledger=ledger)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        list(PrivateLoop(model, optimizer, PrivateDataLoader.poisson(records(), 16), strategy, loss, steps=3))


def test_a_loss_that_combines_records_otherwise_than_declared(tmp_path: Path) -> None:
    message = "in training_step: the loss is a sum over the records, and loss_reduction='mean' is declared"
    with pytest.raises(UnsupportedModuleError, match=message):
        engine(tmp_path, Net(total))
    with pytest.raises(UnsupportedModuleError, match="a mean over the records, and loss_reduction='sum' is declared"):
        engine(tmp_path / "sum", Net(mean), loss_reduction="sum")
    engine(tmp_path / "right", Net(total), loss_reduction="sum")


def test_metrics_of_coupled_records_are_refused(tmp_path: Path) -> None:
    """Bounded, each of them would still move the values of all others."""

    class Measured(Net):
        record_metrics = {"loss": 1}  # noqa: RUF012  as a user writes it

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": mean(self, *batch), "record_metrics": {"loss": self.loss(self, *batch)}}

    def expanded(module: Net, x: Tensor, y: Tensor) -> Tensor:
        return mean(module, x, y).detach().expand(len(x))

    with pytest.raises(UnsupportedModuleError, match="in record_metrics"):
        engine(tmp_path, Measured(expanded), metrics={"loss": 3.0})
    engine(tmp_path / "not asked for", Measured(expanded))
    engine(tmp_path / "right", Measured(each), metrics={"loss": 3.0})


def test_microbatches_may_be_coupled_inside_only(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match=MIXED):
        engine(tmp_path, Net(centered), microbatch_size=4)
    fit(tmp_path / "whole", Net(centered), microbatch_size=16)  # the lot is one microbatch


def test_a_loss_of_the_number_of_records_beside_a_draw(tmp_path: Path) -> None:
    def larger(module: Net, x: Tensor, y: Tensor) -> Tensor:
        flip = torch.rand(1) < 0.5  # as torchvision's transforms draw
        return mean(module, torch.where(flip, x.flip(-1), x), y) * len(x)

    with pytest.raises(UnsupportedModuleError, match="depends on the number of records in its batch"):
        fit(tmp_path, Net(larger))


# ------------------------------------------------------------------------------------------------- healthy


class Metric(nn.Module):
    """Keeps a metric and attributes, which have to be as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.sizes = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.mean(x.detach())
        return x


def random_numbers(module: Net, x: Tensor, y: Tensor) -> Tensor:
    """Of all generators: torch's, numpy's, Python's, and a module's own ones."""
    noise = np.random.normal(size=tuple(x.shape)) * random.random() + module.rng.normal(size=tuple(x.shape))
    x = x + 0.1 * torch.from_numpy(noise).float()
    return mean(module, F.dropout(x, 0.3) + torch.randn(x.shape, generator=module.drawn), y)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


@pytest.mark.parametrize(
    ("loss", "inside", "manual"),
    [(random_numbers, None, True), (mean, Metric, False)],
)
def test_healthy_steps_pass_and_are_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: LossOf, inside: Any, manual: bool
) -> None:
    """Weights, attributes and metrics are to the last bit what they are where half batches are not run."""
    ends = []
    for asks in (True, False):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        module = Net(loss, inside and inside(), manual)
        if not asks:
            monkeypatch.setattr(NumberOfRecords, "on_release", lambda self: None)
        fit(tmp_path / str(asks), module, 3)
        kept = [module.net[1].sizes, module.net[1].mean.compute()] if inside is Metric else []
        ends.append((weights_of(module).tolist(), module.calls, kept, states()))
    assert ends[0] == ends[1] and ends[0][1] == 3


def test_steps_that_need_a_whole_lot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(module: Net, x: Tensor, y: Tensor) -> Tensor:
        if len(x) < 10:
            raise ValueError("too few")
        return mean(module, x, y)

    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    engine(tmp_path, Net(whole))
    assert sum("could not be checked: training_step raises ValueError" in line for line in lines) == 1


def test_gradients_are_compared_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32, which GPUs use in convolutions, rounding alone would look like coupling; the step itself keeps it."""
    precision: Any = torch.backends.cudnn.conv
    seen: list[str] = []
    note = iter(lambda: seen.append(precision.fp32_precision), 0)  # a list in a closure would be put back

    def told(module: Net, x: Tensor, y: Tensor) -> Tensor:
        next(note)
        return mean(module, x, y)

    monkeypatch.setattr(tf32, "is_allowed", lambda device: True)  # as on a GPU
    before = precision.fp32_precision
    fit(tmp_path, Net(told), 1)
    assert precision.fp32_precision == before == "tf32"
    assert set(seen) == {"tf32", "ieee"} and seen.count("tf32") == 1
