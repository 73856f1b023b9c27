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

from tests.strategies.worlds import Classifier, fit

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


def test_it_is_added_to_the_released_one(tmp_path: Path) -> None:
    module = Module()
    start = copy.deepcopy(module)
    assert fit(tmp_path, module, 1).epsilon() == fit(tmp_path / "without", Classifier(), 1).epsilon()
    gradients = zip(module.made.released, module.made.gradients, strict=True)
    for old, new, (released, public) in zip(start.parameters(), module.parameters(), gradients, strict=True):
        torch.testing.assert_close((old - new).detach() / RATE, released + public, rtol=1e-3, atol=1e-5)
