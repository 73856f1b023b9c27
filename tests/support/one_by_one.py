"""Networks of which the engine knows little, and per-record gradients of autograd to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from dpbench.callback.loop import PrivateLoop
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.records.examples import Examples
from dpbench.strategies import (
    DPSGD,
    ClipOnly,
)
from tests.strategies.worlds import loader_of, trainer_for, weights_of

BOUND = 0.3
Step = Callable[[Any, Any], Tensor]


class Module(pl.LightningModule):
    """A network, and what is done with it."""

    def __init__(self, net: nn.Module, step: Step) -> None:
        super().__init__()
        self.net = net
        self._step = (step,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (step,) = self._step
        return step(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)


def cross_entropy(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def data(size: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(size, 5, 6, generator=generator), torch.arange(size) % 4)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, *, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return x * self.weight * factor, self.weight.sum()


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        gated, total = self.gate(x=x, factor=0.5)
        return self.out(gated.flatten(1)) * total


class Routed(nn.Module):
    """Each record takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(30, 4), nn.Linear(30, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        chosen = (x.sum(1) > 0).long()
        output = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            output = output.index_add(0, rows, expert(x[rows]))
        return output


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 4))


def penalized(net: nn.Module, batch: Any) -> Tensor:
    """A gradient penalty, as WGAN-GP has: a second derivative."""
    x = batch[0].clone().requires_grad_(True)
    output = net(x)
    (gradient,) = torch.autograd.grad(output.logsumexp(1).sum(), x, create_graph=True)
    penalty = (gradient.flatten(1).norm(dim=1) - 1).square()
    return (F.cross_entropy(output, batch[1], reduction="none") + penalty).mean()


def with_lasso(net: nn.Module, batch: Any) -> Tensor:
    """A penalty on the weights belongs to each record's loss, as its gradient says."""
    return cross_entropy(net, batch) + 0.01 * sum(p.abs().sum() for p in net.parameters())


def expected(net: nn.Module, step: Step, records: TensorDataset) -> list[Tensor]:
    """Mean of the clipped gradients of each record alone, in float64."""
    net = copy.deepcopy(net).double()
    parameters = list(net.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for position in range(len(records)):
        x, y = default_collate([records[position]])
        gradients = torch.autograd.grad(step(net, (x.double(), y)), parameters, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        norm = torch.stack([g.square().sum() for g in dense]).sum().sqrt()
        for sum_, gradient in zip(total, dense, strict=True):
            sum_ += min(1.0, BOUND / max(float(norm), 1e-12)) * gradient / len(records)
    return total


NETWORKS = {
    "keywords and tuples": (Keywords, cross_entropy),
    "routing": (Routed, cross_entropy),
    "gradient penalty": (plain, penalized),
    "lasso": (plain, with_lasso),
}


def assert_releases_autograd(folder: Path, net: nn.Module, step: Step, strategy: ClipOnly) -> None:
    """One lot of all records, without noise: the update is the mean of the records' clipped gradients."""
    wanted = expected(net, step, data())
    before = [p.detach().clone() for p in net.parameters()]
    loader = PrivateDataLoader(data(), PrivateBatchSampler(make_sampling("full", 12, 12), None))
    trainer_for(folder, strategy, 1).fit(Module(net, step), loader)
    for old, p, update in zip(before, net.parameters(), wanted, strict=True):
        torch.testing.assert_close((old - p).double(), update, rtol=1e-4, atol=1e-6)


def fit(
    folder: Path, net: nn.Module, make: Any = DPSGD, steps: int = 6, step: Step = cross_entropy, **options: Any
) -> Any:
    loader = options.pop("loader", None) or loader_of(data(40), 6)
    start = options.pop("start", None)
    options = {"noise_multiplier": 1.0, "delta": 1e-3, "seed": 1, **options}
    strategy = make(ledger=str(folder / "ledger.jsonl"), **{"gradients": "one_by_one", **options})
    trainer = trainer_for(folder, strategy, steps)
    trainer.fit(Module(net, step), loader, ckpt_path=start, weights_only=False)
    return strategy, weights_of(net), trainer


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1) / x.abs().max())


def loop_of(folder: Path, net: nn.Module, step: Step, gradients: str = "one_by_one") -> PrivateLoop:
    strategy = DPSGD(
        noise_multiplier=1.0,
        delta=1e-3,
        gradients=gradients,
        ledger=str(folder / "ledger.jsonl"),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return PrivateLoop(net, optimizer, loader_of(data(40), 6), strategy, step, steps=6)


def used(strategy: Any) -> str:
    """The method of a training that is over; the source has let go of it."""
    source = strategy._source
    assert isinstance(source, Examples)
    return "one_by_one" if source._at_once == 1 else "engine"
