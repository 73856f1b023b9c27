"""Optimizers see the released gradients of a lot and nothing else of it: no loss, no argument, no other gradient."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.guards.withheld_loss import WITHHELD_LOSS
from tests.strategies.worlds import Classifier, fit, weights_of

READS = "optimizer reads the loss of a batch"


class Reading(SGD):
    """Descends by a factor that `factor(loss)` gives."""

    def __init__(self, params: Any, factor: Callable[[Any], Any], closures: int = 1) -> None:
        super().__init__(params, lr=0.1)
        self.factor = factor
        self.closures = closures

    def step(self, closure: Any = None) -> Any:
        for _ in range(self.closures):
            with torch.enable_grad():
                loss = closure()
        self.param_groups[0]["lr"] = 0.1 * self.factor(loss)
        super().step()
        return loss


def polyak(params: Any) -> Optimizer:
    """SPS (Loizou et al. 2021), the factor of the gradient."""
    return Reading(params, lambda loss: min(loss.item(), 1.0))


class Wrapper(Optimizer):
    """Around another optimizer, without a call of `Optimizer.__init__`."""

    def __init__(self, base: Optimizer, factor: Callable[[Any], Any]) -> None:
        self.base, self.factor, self.defaults, self.state = base, factor, base.defaults, base.state
        self.param_groups = base.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.factor(loss)
        self.base.step()
        return loss


def wrapped(params: Any, factor: Callable[[Any], Any] = float) -> Optimizer:
    return Wrapper(SGD(params, lr=0.1), factor)


class Of(Classifier):
    """Trained by any optimizer; in manual optimization by a closure."""

    def __init__(self, make: Callable[[Any], Any], manual: bool = False) -> None:
        super().__init__(manual)
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)
        return None

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


# ------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(("make", "manual"), [(polyak, False), (wrapped, True)])
def test_an_optimizer_that_reads_the_loss_is_refused(tmp_path: Path, make: Any, manual: bool) -> None:
    with pytest.raises(ConfigurationError, match=READS):
        fit(tmp_path, Of(make, manual))


READINGS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "numpy": lambda loss: loss.numpy(),
    "less": lambda loss: loss < 1,
    "data": lambda loss: loss.data,
    "product": torch.ones(3).mul_,
    "rounded": round,
    "backward": lambda loss: loss.backward(),
    "pickled": pickle.dumps,
}


@pytest.mark.parametrize("name", READINGS)
def test_every_way_to_read_it_says_why(name: str) -> None:
    with pytest.raises(ConfigurationError, match=READS):
        READINGS[name](WITHHELD_LOSS)


def test_what_goes_around_torchs_functions_finds_nothing() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(3).add_(torch.ones(3), alpha=WITHHELD_LOSS)
    assert torch.as_tensor(WITHHELD_LOSS) is WITHHELD_LOSS and repr(WITHHELD_LOSS) == "<withheld loss>"


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (lambda loss: {"loss": loss.item()}, "loss"),
        (lambda loss: {"of": lambda: loss}, "of"),
        (lambda loss: {"verbose": True, "epoch": 3, "mode": "plain", "other": None}, None),
    ],
    ids=["number", "function", "flags"],
)
def test_arguments_beside_the_closure(tmp_path: Path, given: Any, refused: str | None) -> None:
    class Given(SGD):
        def step(self, closure: Any = None, **_: Any) -> Any:
            return super().step(closure)

    class Module(Of):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.optimizers().step(**given(loss))

    module = Module(partial(Given, lr=0.1), manual=True)
    if refused is None:
        assert fit(tmp_path, module).releases == 4
        return
    with pytest.raises(ConfigurationError, match=rf"Given.step gets {refused} .* in addition to a closure"):
        fit(tmp_path, module)


def test_a_module_that_steps_by_itself_sees_no_loss_there(tmp_path: Path) -> None:
    class Warm(Classifier):
        looks = False

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            loss = optimizer_closure()
            optimizer.step()
            if self.looks:
                optimizer.param_groups[0]["lr"] = 0.1 * float(loss)

    module = Warm()
    assert fit(tmp_path, module).releases == 4 and "optimizer_step" not in vars(module)
    module = Warm()
    module.looks = True
    with pytest.raises(ConfigurationError, match=READS):
        fit(tmp_path / "looks", module)


def test_two_closures_in_a_step_are_refused(tmp_path: Path) -> None:
    """As sharpness-aware minimization makes."""
    with pytest.raises(ConfigurationError, match="the optimizer stepped twice on one batch"):
        fit(tmp_path, Of(lambda params: Reading(params, lambda _: 1.0, closures=2), manual=True))


def test_gradients_of_frozen_parameters_are_no_way_around_the_noise(tmp_path: Path) -> None:
    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__(manual=True)
            self.extra = nn.Parameter(torch.zeros(1, 8, 8), requires_grad=False)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.extra.grad = batch[0].mean(0)
            self.manual_backward(loss)
            self.optimizers().step()

    with pytest.raises(UnsupportedModuleError, match="frozen parameter of shape .1, 8, 8. has a gradient"):
        fit(tmp_path, Frozen())


def test_an_optimizer_that_nobody_can_watch(tmp_path: Path) -> None:
    class Stranger:
        def __init__(self, params: Any) -> None:
            inner = self.inner = SGD(params, lr=0.1)
            self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
            self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    class Module(Of):
        def optimizer_zero_grad(self, *_: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Stranger is not a subclass of torch.optim.Optimizer"):
        fit(tmp_path, Module(Stranger))


# ------------------------------------------------------------------------------------------------- trained


class Sub(Adam):
    """Calls the step of its base class, which is watched too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(("make", "manual"), [(partial(wrapped, factor=lambda loss: loss), False), (Sub, True)])
def test_optimizers_that_read_gradients_alone_train(tmp_path: Path, make: Any, manual: bool) -> None:
    module = Of(make, manual)
    before = weights_of(module)
    Adam([nn.Parameter(torch.zeros(1))])  # whose step is hooked from then on, and called by a subclass's
    assert fit(tmp_path, module).releases == 4
    assert not torch.equal(weights_of(module), before)


# ------------------------------------------------------------------------------------------------- float16


def test_parameters_in_float16_are_refused(tmp_path: Path) -> None:
    module = Classifier()
    module.on_train_start = module.half
    with pytest.raises(ConfigurationError, match="trained parameters are in float16"):
        fit(tmp_path, module)


def test_frozen_parameters_may_be_in_float16(tmp_path: Path) -> None:
    module = Classifier()
    module.base = nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)
    assert fit(tmp_path, module).releases == 4
