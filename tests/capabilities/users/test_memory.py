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
from dpbench.data.lots import LotLoader
from dpbench.records import LocalTraining
from dpbench.records.step_state import PublicState
from dpbench.strategies import ClipOnly
from tests.capabilities.users.worlds import WIDTH, Toy, fit, linear, make_users, naive_training
from tests.guards.plain_training import plain_training
from tests.strategies.worlds import weights_of

LOCAL = LocalTraining(lr=0.2, batch_size=2, epochs=2)
ROUNDS = 4
BOUND = 0.2


class RunningMean(Toy):
    """Divides by a running mean of its losses, kept in an attribute."""

    mean = 1.0

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean


class Bank(Toy):
    """Pulls to the mean of the inputs that it has seen."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.bank: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        self.bank.append(batch[0].mean(0))
        return super().loss(batch) + (self.net(torch.stack(self.bank)) - 1).square().mean()


class LateBank(Bank):
    """Remembers from the seventh call on, which lies between those that used to be looked at."""

    calls = 0

    def loss(self, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(batch) if self.calls > 6 else Toy.loss(self, batch)


class Curriculum(Toy):
    """Weighs the loss by the number of calls."""

    calls = 0

    def loss(self, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(batch) * min(1.0, self.calls / 50)


class FirstWins(Toy):
    """Centers all inputs by those of the first batch that it ever saw."""

    center: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        if self.center is None:
            self.center = batch[0].mean(0)
        return super().loss((batch[0] - self.center, batch[1]))


class MeasuredWeight(Toy):
    """Divides by a metric of all that it has seen."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.seen = torchmetrics.MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.seen.update(loss.detach())
        return loss / (1 + self.seen.compute().to(loss))


_OUTSIDE: list[Tensor] = []


class Outside(Toy):
    """Remembers in a list that is no attribute of it."""

    def loss(self, batch: Any) -> Tensor:
        _OUTSIDE.append(batch[0].mean(0).to(batch[0]))
        return super().loss(batch) + (self.net(torch.stack(_OUTSIDE)) - 1).square().mean()


@pytest.mark.parametrize("kind", [RunningMean, Bank, LateBank, Curriculum, FirstWins, MeasuredWeight, Outside])
def test_each_user_begins_with_the_module_as_it_was(
    tmp_path: Path,
    kind: type[Toy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    users = make_users()
    module = kind(linear())
    loader = LotLoader.poisson(users, 4, seed=0)
    if kind is Outside:  # of which no copy of the module has one of its own
        plain = Toy.loss
        local = LocalTraining(lr=0.2, batch_size=8)  # one batch of each user
        with monkeypatch.context() as patch:
            patch.setattr(Outside, "loss", lambda self, batch: plain(self, batch) + _pull(self, batch))
            wanted = naive_training(module, loader, local, ROUNDS, BOUND)
    else:
        local = LOCAL
        wanted = naive_training(module, loader, local, ROUNDS, BOUND)
    options = {"max_grad_norm": BOUND, "trainer": {"precision": "64-true"}}
    fit(tmp_path, module, users, ROUNDS, local, ClipOnly, LotLoader.poisson(users, 4, seed=0), **options)
    torch.testing.assert_close(weights_of(module), weights_of(wanted), rtol=1e-9, atol=1e-12)


def _pull(module: Toy, batch: Any) -> Tensor:
    return (module.net(batch[0].mean(0, keepdim=True)) - 1).square().mean()


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
    fit(tmp_path, module, steps=2)
    assert module.calls > 2
    assert module.others == 0


class Own(torchmetrics.Metric):
    """Does not say whether updates depend on what was seen before (`full_state_update`)."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total += x.sum()

    def compute(self) -> Tensor:
        return self.total


class TwoMetrics(Toy):
    """A metric whose states can be merged, and one whose states cannot."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.error = torchmetrics.MeanSquaredError()
        self.running = Own()

    def loss(self, batch: Any) -> Tensor:
        self.error.update(self.net(batch[0]).squeeze(1).detach(), batch[1])
        self.running.update(batch[1])
        return super().loss(batch)


def test_states_of_metrics_are_merged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    users = make_users()
    loader = LotLoader.poisson(users, 4, seed=0)
    module = TwoMetrics(linear())
    module.error.update(torch.zeros(2), torch.ones(2))
    fit(tmp_path, module, users, 1, LocalTraining(lr=0.1, batch_size=2), loader=LotLoader.poisson(users, 4, seed=0))
    examples = sum(len(users.rows(user)) for user in loader.lots.lot(0).tolist())
    assert int(module.error.total) == examples + 2
    assert "states of Own cannot be merged" in caplog.text


class Measured(Toy):
    """With a metric that keeps lists."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.targets = torchmetrics.CatMetric()

    def loss(self, batch: Any) -> Tensor:
        self.targets.update(batch[1])
        return super().loss(batch)


def test_lists_of_metrics_hold_each_example_once(tmp_path: Path) -> None:
    users = make_users()
    loader = LotLoader.poisson(users, 4, seed=0)
    module = Measured(linear())
    fit(tmp_path, module, users, 2, LocalTraining(lr=0.1, batch_size=2), loader=LotLoader.poisson(users, 4, seed=0))
    wanted = [len(users.rows(user)) for lot in range(2) for user in loader.lots.lot(lot).tolist()]
    assert len(module.targets.compute()) == sum(wanted)


# ------------------------------------------------------------------------------------------------- what is reached

_SEEN: list[Tensor] = []
_CENTER: Tensor | None = None


def _center(x: Tensor) -> Tensor:
    """The mean of all that was seen, in a list of the file's."""
    _SEEN.append(x.mean(0))
    return torch.stack(_SEEN).mean(0)


class ByHelper(Toy):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch[0] - _center(batch[0]), batch[1]))


class Rebinds(Toy):
    def loss(self, batch: Any) -> Tensor:
        global _CENTER
        if _CENTER is None:
            _CENTER = batch[0].mean(0)
        return super().loss((batch[0] - _CENTER, batch[1]))


class InTheClass(Toy):
    bank: tuple[Tensor, ...] = ()

    def loss(self, batch: Any) -> Tensor:
        type(self).bank = (*self.bank, batch[0].mean(0))
        return super().loss((batch[0] - torch.stack(self.bank).mean(0), batch[1]))


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


class NewMemory(Toy):
    """Gives a tensor other memory."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.center = torch.zeros(WIDTH)

    def loss(self, batch: Any) -> Tensor:
        self.center.data = self.center + batch[0].mean(0)
        return super().loss((batch[0] - self.center, batch[1]))


class Hooked(Toy):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        seen: list[Tensor] = []

        def centered(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            seen.append(output.detach().mean(0))
            return output - torch.stack(seen).mean(0)

        net[0].register_forward_hook(centered)  # type: ignore[operator,index]


REACHED = [RunningMean, Bank, ByHelper, Rebinds, InTheClass, OwnGenerator, ByGradient, NewMemory, Hooked]


@pytest.mark.parametrize("kind", [RunningMean, Bank, ByHelper, Rebinds, InTheClass, NewMemory])
def test_so_has_a_record_after_another_one(kind: type[Toy]) -> None:
    module = kind(linear())
    one, other = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    state = PublicState(plain_training(module))
    alone = module.loss((one, torch.zeros(3)))
    state.put_back()
    module.loss((other, torch.zeros(3)))
    state.put_back()
    assert torch.equal(module.loss((one, torch.zeros(3))), alone)
    state.put_back()


@pytest.mark.parametrize("kind", REACHED)
def test_a_user_after_another_one_has_the_loss_that_it_has_alone(kind: type[Toy]) -> None:
    module = kind(linear())
    module.net.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    one, other = [(torch.randn(3, WIDTH, generator=generator), torch.randn(3, generator=generator)) for _ in range(2)]
    state = UserState(plain_training(module))
    alone = module.loss(one)
    state.put_back()
    module.loss(other)
    state.put_back()
    assert torch.equal(module.loss(one), alone)
    state.put_back()
