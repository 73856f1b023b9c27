"""A public loss beside the private one: a second gradient, which an optimizer adds to the released one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.strategies.worlds import Classifier, fit, loader_of, pictures

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

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        x, y = next(self.public_batches)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.released = [p.grad.clone() for p in parameters]
        with torch.enable_grad():
            public_loss = nn.functional.cross_entropy(self.network(x), y)
        self.gradients = torch.autograd.grad(public_loss, parameters)
        for p, gradient in zip(parameters, self.gradients, strict=True):
            p.grad.add_(gradient)
        super().step()
        return loss


class Module(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made = WithPublicData(self.net, cycle(public_loader()))
        return self.made


def test_the_public_gradient_knows_nothing_of_private_records(tmp_path: Path) -> None:
    """Other private records, same weights: the first public gradient is the same to the bit, and epsilon always."""
    x, y = pictures().tensors
    torch.manual_seed(4)
    start = Module()
    start.net[4] = nn.Identity()
    trained, epsilons = [], []
    for name, data in (("one", pictures()), ("other", TensorDataset(x * -3.0, (y + 1) % 3))):
        module = copy.deepcopy(start)
        epsilons.append(fit(tmp_path / name, module, 1, loader=loader_of(data)).epsilon())
        for old, new, one, other in zip(
            start.parameters(), module.parameters(), module.made.released, module.made.gradients, strict=True
        ):
            torch.testing.assert_close((old - new).detach() / RATE, one + other, rtol=1e-3, atol=1e-5)
        trained.append(module.made)
    one, other = trained
    assert all(map(torch.equal, one.gradients, other.gradients))
    assert not any(map(torch.equal, one.released, other.released))
    assert epsilons[0] == epsilons[1]
