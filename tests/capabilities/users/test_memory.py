"""What training_step keeps of one user's examples is put back before the next user, in every cohort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import dpbench
from dpbench.capabilities.users.state import UserState
from dpbench.records import LocalTraining
from tests.capabilities.users.test_local_training import compare
from tests.capabilities.users.worlds import WIDTH, Toy, fit, linear, loader_of, make_users
from tests.guards.plain_training import plain_training

LOCAL = LocalTraining(lr=0.2, batch_size=2, epochs=2)


class Bank(Toy):
    """Pulls to the mean of the inputs that it has seen, from the seventh batch on."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.bank: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        self.bank.append(batch[0].mean(0))
        return super().loss(batch) * (1 + (len(self.bank) > 6) * torch.stack(self.bank).square().mean())


def test_each_user_begins_with_the_module_as_it_was(tmp_path: Path) -> None:
    compare(tmp_path, Bank(linear()), make_users(), LOCAL, 0.2)


@dpbench.independent("calls")
class Counter(Toy):
    calls = 0
    others = 0

    def loss(self, batch: Any) -> Tensor:
        self.calls += 1
        self.others += 1
        return super().loss(batch)


def test_a_declared_counter_goes_on(tmp_path: Path) -> None:
    module = Counter(linear())
    fit(tmp_path, module)
    assert module.calls > 2 and module.others == 0


class Own(torchmetrics.SumMetric):
    """One that cannot be merged."""

    def merge_state(self, other: Any) -> None:
        raise RuntimeError


class Measured(Toy):
    """A metric whose states can be merged, one that keeps lists, and one whose states cannot be merged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.error = torchmetrics.MeanSquaredError()
        self.targets = torchmetrics.CatMetric()
        self.running = Own()

    def loss(self, batch: Any) -> Tensor:
        self.error.update(self.net(batch[0]).squeeze(1).detach(), batch[1])
        self.targets.update(batch[1])
        self.running.update(batch[1])
        return super().loss(batch)


def test_states_of_metrics_hold_each_example_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(make_users())
    module = Measured(linear())
    module.error.update(torch.zeros(2), torch.ones(2))
    fit(tmp_path, module, local=LocalTraining(batch_size=2), loader=loader)
    users: Any = loader.dataset
    examples = sum(users.sizes[loader.lots.lot(step)].sum() for step in range(2))
    assert (int(module.error.total), len(module.targets.compute())) == (examples + 2, examples)
    assert "states of Own cannot be merged" in caplog.text


# ------------------------------------------------------------------------------------------------- what is reached

_SEEN: list[Tensor] = []


class OfTheFile(Toy):
    """Remembers in a list that is no attribute of it."""

    def loss(self, batch: Any) -> Tensor:
        _SEEN.append(batch[0].mean(0))
        return super().loss((batch[0] - torch.stack(_SEEN).mean(0), batch[1]))


class OwnGenerator(Toy):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.generator = torch.Generator().manual_seed(3)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] + torch.randn(batch[0].shape, generator=self.generator), batch[1]))


class ByGradient(Toy):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        loss.backward(retain_graph=True)
        return loss * next(p.grad.norm().detach() for p in self.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", [OfTheFile, OwnGenerator, ByGradient])
def test_a_user_after_another_one_has_the_loss_that_it_has_alone(kind: type[Toy]) -> None:
    module = kind(linear())
    state = UserState(plain_training(module))
    losses = []
    for seed in (1, 2, 1):
        generator = torch.Generator().manual_seed(seed)
        losses.append(module.loss((torch.randn(3, WIDTH, generator=generator), torch.ones(3))))
        state.put_back()
    assert torch.equal(losses[0], losses[2])
