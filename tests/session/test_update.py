"""Updates that are repeated from a recording: those of the optimizer, whatever moves its options and its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader
from dpbench.session._update_graph import UpdateGraphs
from dpbench.strategies import DPSGD
from tests.session.test_graphs import STEPS, Recorder, fit, lines
from tests.session.test_padding import loader
from tests.strategies.worlds import Classifier, pictures, weights_of

__all__ = ["lines"]

CPU = torch.device("cpu")
MAKES: list[Callable[[Any], Optimizer]] = [
    partial(SGD, lr=0.1),
    partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    partial(SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    partial(Adam, lr=0.01),
    partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    partial(AdamW, lr=0.01, foreach=True),
]
Event = Callable[[int, Optimizer], object]


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def trained(
    make: Callable[[Any], Optimizer],
    is_recorded: bool,
    event: Event | None = None,
    steps: int = STEPS,
    net: nn.Module | None = None,
    said: list[str] | None = None,
) -> tuple[Tensor, UpdateGraphs]:
    """Weights after steps by gradients that are the same in each call."""
    net = net or network()
    optimizer = make(net.parameters())
    updates = UpdateGraphs()
    if is_recorded:
        updates.attach(optimizer, CPU, ([] if said is None else said).append)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for parameter in net.parameters():
            # Gradients of a release have the order of a flat sum, whatever the layout of their parameters.
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype) if parameter.requires_grad else None
        if event is not None:
            event(step, optimizer)
        optimizer.step()
    if is_recorded:
        updates.detach()
    return weights_of(net), updates


def cooled(step: int, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("event", [None, cooled])
def test_the_updates_of_the_optimizer(make: Any, event: Event | None) -> None:
    expected, _ = trained(make, False, event)
    weights, updates = trained(make, True, event)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert updates.recordings == 1 and updates.uses >= STEPS - 2


def test_learning_rates_in_tensors() -> None:
    expected, _ = trained(partial(SGD, lr=0.1), False, cooled)

    def moved(step: int, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + step))

    weights, updates = trained(lambda parameters: SGD(parameters, lr=torch.tensor(0.1)), True, moved)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert updates.recordings == 1


def groups(parameters: Any) -> Optimizer:
    first, *others = parameters
    return Adam(
        [{"params": [first], "lr": 0.05, "betas": (0.5, 0.9)}, {"params": others, "weight_decay": 0.1}], lr=0.01
    )


def decayed(step: int, optimizer: Optimizer) -> None:
    optimizer.param_groups[-1]["weight_decay"] = 0.3 if step > 8 else 0.1


def frozen(step: int, optimizer: Optimizer) -> None:
    """The first parameter joins late."""
    if step < 6:
        optimizer.param_groups[0]["params"][0].grad = None


def reloaded(step: int, optimizer: Optimizer) -> None:
    if step == 8:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def reset(step: int, optimizer: Optimizer) -> None:
    if step == 8:
        optimizer.state.clear()


def moved_in_memory(step: int, optimizer: Optimizer) -> None:
    if step == 8:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data = parameter.data.clone()


def enlarged(step: int, optimizer: Optimizer) -> None:
    if step == 8:
        late = nn.Parameter(torch.zeros(2))
        late.grad = torch.ones(2)
        optimizer.add_param_group({"params": [late]})


@pytest.mark.parametrize("make", [groups, MAKES[1], MAKES[2], MAKES[4]])
@pytest.mark.parametrize("event", [decayed, frozen, reloaded, reset, moved_in_memory, enlarged])
def test_what_moves_between_updates(make: Any, event: Event) -> None:
    expected, _ = trained(make, False, event)
    weights, updates = trained(make, True, event)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert updates.recordings == 2 and updates.uses >= 8


def test_options_that_move_in_each_step() -> None:
    said: list[str] = []

    def event(step: int, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.01 * (step // 2)

    expected, _ = trained(MAKES[1], False, event, steps=80)
    weights, updates = trained(MAKES[1], True, event, steps=80, said=said)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert len(said) == 1 and "move from step to step" in said[0]
    assert updates.recordings == 16


class Own(SGD):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    ("make", "dtype", "reason"),
    [
        (Own, torch.float32, "Own is not SGD, Adam or AdamW"),
        (RMSprop, torch.float32, "RMSprop is not SGD, Adam or AdamW"),
        (SGD, torch.float64, "parameters of torch.float64"),
        (
            partial(Adam, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
            torch.float32,
            "its betas are tensors",
        ),
    ],
)
def test_updates_that_stay_eager(make: Any, dtype: torch.dtype, reason: str) -> None:
    said: list[str] = []
    make = partial(make, lr=0.01)
    expected, _ = trained(make, False, net=network().to(dtype))
    weights, updates = trained(make, True, net=network().to(dtype), said=said)
    assert torch.equal(weights, expected)
    assert len(said) == 1 and reason in said[0]
    assert updates.recordings == 0


def test_the_optimizer_is_given_back() -> None:
    net = network()
    optimizer = Adam(net.parameters(), lr=0.01)
    LambdaLR(optimizer, lambda step: 1.0)
    before = (dict(vars(optimizer)), dict(optimizer.param_groups[0]))
    updates = UpdateGraphs()
    updates.attach(optimizer, CPU, print)
    gradients = []
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
        gradients.append(parameter.grad)

    def closure() -> Tensor:
        calls.append("closure")
        return torch.tensor(3.0)

    for _ in range(4):
        versions = [parameter._version for parameter in net.parameters()]
        assert float(optimizer.step(closure)) == 3
        assert all(p.grad is gradient for p, gradient in zip(net.parameters(), gradients, strict=True))
        assert all(bool((gradient == 1).all()) for gradient in gradients)
        assert all(p._version > version for p, version in zip(net.parameters(), versions, strict=True))
    assert updates.uses and calls == ["before", "closure", "after"] * 4
    updates.detach()
    assert vars(optimizer)["step"] is before[0]["step"]
    assert optimizer.param_groups[0] == before[1]


# ------------------------------------------------------------------------------------- in a training


class Scheduled(Classifier):
    """Two groups with Adam, whose learning rate falls in each step."""

    make = Adam
    schedule: Any = staticmethod(lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step))

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        optimizer = self.make([{"params": [first], "lr": 0.02}, {"params": others}], lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


class Cycled(Scheduled):
    """Its momentum moves in each step, too."""

    make = SGD
    schedule = staticmethod(lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS + 1))


@pytest.mark.parametrize(("module", "most"), [(Scheduled, 1), (Cycled, 0)])
def test_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, most: int) -> None:
    _, eager, _ = fit(tmp_path / "eager", monkeypatch, None, module=module())
    recorder = Recorder()
    _, graph, trainer = fit(tmp_path / "graph", monkeypatch, recorder, module=module())
    torch.testing.assert_close(graph, eager, rtol=1e-3, atol=1e-3)
    assert recorder.update.recordings == most
    optimizer = trainer.optimizers[0]
    assert not optimizer.param_groups[0]["fused"] and isinstance(optimizer.param_groups[0]["lr"], float)


@pytest.mark.parametrize("module", [Scheduled, Cycled])
def test_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    _, whole, _ = fit(tmp_path / "whole", monkeypatch, Recorder(), module=module())
    _, _, half = fit(tmp_path / "half", monkeypatch, Recorder(), module=module(), steps=STEPS // 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    recorder = Recorder()
    _, resumed, _ = fit(tmp_path / "half", monkeypatch, recorder, module=module(), start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed)


def test_hooks_of_parameters_and_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hooked(Scheduled):
        """Keeps the norms of released gradients, and its first bias at zero."""

        def __init__(self) -> None:
            super().__init__()
            self.net[0].weight.register_hook(lambda gradient: None)

        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            bias = self.net[0].bias
            configured["optimizer"].register_step_post_hook(lambda *_: bias.data.zero_())
            return configured

    weights = []
    recorder = Recorder()
    for name, executor in (("eager", None), ("graph", recorder)):
        module = Hooked()
        weights.append(fit(tmp_path / name, monkeypatch, executor, module=module)[1])
        assert not module.net[0].bias.any()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-3)
    assert recorder.update.uses > STEPS // 2


def test_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    recorder = Recorder()
    for name, executor in (("eager", None), ("graph", recorder)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        optimizer = SGD(net.parameters(), lr=0.5, momentum=0.9)
        if executor is not None:
            monkeypatch.setattr("dpbench.callback.strategy.executor_of", lambda name, size: recorder)
        strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, seed=3, ledger=str(tmp_path / name / "ledger.jsonl"))
        lots: LotLoader = loader(pictures())
        schedule = LambdaLR(optimizer, lambda step: 0.9**step)
        for _ in PrivateLoop(
            net,
            optimizer,
            lots,
            strategy,
            lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
            steps=STEPS,
        ):
            schedule.step()
        weights.append(weights_of(net))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-3)
    assert recorder.update.recordings == 1
