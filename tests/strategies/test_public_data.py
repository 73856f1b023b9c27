"""A public loss beside the private one: a second gradient, which an optimizer adds to the released one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD, ClipOnly
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for

RATE = 0.5


def public_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(24, 1, 8, 8, generator=generator), torch.arange(24) % 3)
    return DataLoader(data, batch_size=6)


class WithPublicData(torch.optim.SGD):
    """As docs/module.md shows it."""

    def __init__(self, network: nn.Module, batches: Iterator[Any]) -> None:
        super().__init__(network.parameters(), lr=RATE)
        self.network = network
        self.public_batches = batches
        self.history: list[tuple[list[Tensor], list[Tensor]]] = []

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        x, y = next(self.public_batches)
        parameters = [p for group in self.param_groups for p in group["params"]]
        released = [p.grad.clone() for p in parameters]
        with torch.enable_grad():
            public_loss = nn.functional.cross_entropy(self.network(x), y)
        gradients = torch.autograd.grad(public_loss, parameters)
        self.history.append((released, list(gradients)))
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad.add_(gradient)
        super().step()
        return loss


class Module(Classifier):
    """Without dropout; keeps its weights before and after each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
        self.weights: list[list[Tensor]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.weights.append([p.detach().clone() for p in self.parameters()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made = WithPublicData(self.net, cycle(public_loader()))
        return self.made


def fit(folder: Path, strategy: Any, data: Any, kind: str = "poisson") -> Module:
    module = Module()
    trainer_for(folder, strategy, 4).fit(module, loader_of(data, len(data) if kind == "full" else 12, kind=kind))
    module.weights.append([p.detach().clone() for p in module.parameters()])
    return module


def clipped_mean(module: Module, weights: list[Tensor], bound: float) -> list[Tensor]:
    """Mean of the private records' clipped gradients, one by one in float64."""
    network = Module().double()
    with torch.no_grad():
        for p, weight in zip(network.parameters(), weights, strict=True):
            p.copy_(weight)
    x, y = pictures().tensors
    parameters = list(network.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for record, label in zip(x.double().split(1), y.split(1), strict=True):
        gradients = torch.autograd.grad(network.loss((record, label)), parameters)
        norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        for place, gradient in enumerate(gradients):
            total[place] += gradient * min(1.0, bound / norm) / len(x)
    return total


def public_gradient(weights: list[Tensor], batch: Any) -> list[Tensor]:
    network = Module().double()
    with torch.no_grad():
        for p, weight in zip(network.parameters(), weights, strict=True):
            p.copy_(weight)
    loss = nn.functional.cross_entropy(network.net(batch[0].double()), batch[1])
    return list(torch.autograd.grad(loss, list(network.parameters())))


def test_the_update_is_the_private_sum_and_the_public_gradient(tmp_path: Path) -> None:
    module = fit(tmp_path, ClipOnly(max_grad_norm=0.3), pictures(), kind="full")
    batches = list(public_loader())
    for step in range(4):
        before, after = module.weights[step : step + 2]
        private = clipped_mean(module, before, 0.3)
        public = public_gradient(before, batches[step])
        for old, new, one, other in zip(before, after, private, public, strict=True):
            torch.testing.assert_close((old - new).double() / RATE, one + other, rtol=1e-3, atol=1e-5)


def test_the_public_gradient_knows_nothing_of_private_records(tmp_path: Path) -> None:
    """Other private records, same weights: the first public gradient is the same to the bit, and epsilon always."""
    x, y = pictures().tensors
    others = TensorDataset(x * -3.0, (y + 1) % 3)
    gradients = []
    epsilons = []
    for name, data in (("one", pictures()), ("other", others)):
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=0)
        module = fit(tmp_path / name, strategy, data)
        gradients.append(module.made.history[0])
        epsilons.append(ledger_epsilon(read_ledger(tmp_path / name / "ledger.jsonl"), 1e-3))
    assert all(torch.equal(a, b) for a, b in zip(gradients[0][1], gradients[1][1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(gradients[0][0], gradients[1][0], strict=True))
    assert epsilons[0] == epsilons[1]


@pytest.mark.parametrize("kind", ["dict", "combined", "list"])
def test_several_loaders_are_refused_with_the_way_that_works(tmp_path: Path, kind: str) -> None:
    private = loader_of(pictures())
    loaders: Any = {"private": private, "public": public_loader()}
    if kind == "combined":
        loaders = CombinedLoader(loaders, "max_size_cycle")
    if kind == "list":
        loaders = [private, public_loader()]
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(ConfigurationError, match="several loaders .* adds the gradient of the public loss"):
        trainer_for(tmp_path, strategy, 2).fit(Module(), loaders)
    assert not (tmp_path / "ledger.jsonl").exists()
