"""Optimizers see the released gradients of a lot and nothing else of it: no loss, no argument, no other gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.guards.withheld_loss import WITHHELD_LOSS
from dpbench.strategies import DPSGD, NonPrivate
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for, weights_of

READS = "optimizer reads the loss of a batch"


class Reading(Optimizer):
    """Descends by a factor that `factor(loss)` gives."""

    def __init__(self, params: Any, factor: Callable[[Any], Any], closures: int = 1) -> None:
        super().__init__(params, {"lr": 0.1})
        self.factor, self.closures = factor, closures

    def step(self, closure: Any = None) -> Any:
        for _ in range(self.closures):
            with torch.enable_grad():
                loss = closure()
        factor = self.factor(loss)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad * group["lr"] * factor)
        return loss


def polyak(params: Any) -> Optimizer:
    """SPS (Loizou et al. 2021), the factor of the gradient."""
    return Reading(params, lambda loss: min(loss.item(), 1.0))


def alig(params: Any) -> Optimizer:
    """ALI-G (Berrada et al. 2020), in tensors."""
    return Reading(params, lambda loss: (loss / (loss.detach() + 1)).clamp(max=1.0))


class AveragedPolyak(torch.optim.Adam):
    """A subclass that calls its base's step; the loss is kept for the next one."""

    last: Any = None

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self.last is not None and loss > self.last:
            return loss
        self.last = loss.item()
        return super().step()


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


def wrapped(params: Any) -> Optimizer:
    return Wrapper(torch.optim.SGD(params, lr=0.1), float)


class Of(Classifier):
    """Trained by any optimizer; in manual optimization by a closure."""

    def __init__(self, make: Callable[[Any], Optimizer], manual: bool = False) -> None:
        super().__init__()
        self.make, self.automatic_optimization = make, not manual

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

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())


def fit(folder: Path, module: pl.LightningModule, steps: int = 4, **options: Any) -> DPSGD:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, **options)
    trainer_for(folder, strategy, steps).fit(module, loader_of(pictures()))
    return strategy


# ------------------------------------------------------------------------------------------------- refused


READERS = [polyak, alig, AveragedPolyak, wrapped]


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("make", READERS, ids=lambda make: make.__name__)
def test_an_optimizer_that_reads_the_loss_is_refused(tmp_path: Path, make: Any, manual: bool) -> None:
    with pytest.raises(ConfigurationError, match=READS):
        fit(tmp_path, Of(make, manual))


def test_in_the_private_step_of_several_networks_too(tmp_path: Path) -> None:
    class Two(Classifier):
        private_module = "net"

        def __init__(self) -> None:
            super().__init__(manual=True)
            self.other = nn.Linear(2, 2)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            private, public = self.optimizers()

            def closure() -> Tensor:
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            private.step(closure=closure)
            public.zero_grad()
            loss = self.other(torch.ones(3, 2)).square().mean()
            loss.backward()
            public.optimizer.step(lambda: loss)  # of nobody's records: may be read

        def configure_optimizers(self) -> Any:
            return [self.private(self.net.parameters()), polyak(self.other.parameters())]

        private: Any = staticmethod(polyak)

    class Healthy(Two):
        private = staticmethod(lambda params: torch.optim.SGD(params, lr=0.1))

    with pytest.raises(ConfigurationError, match=READS):
        fit(tmp_path / "private", Two())
    module = Healthy()
    before = module.other.weight.detach().clone()
    assert fit(tmp_path / "public", module).releases == 4 and not torch.equal(module.other.weight, before)
    assert not _get_current_function_mode_stack()


READINGS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "item": lambda loss: loss.item(),
    "numpy": lambda loss: loss.numpy(),
    "array": lambda loss: __import__("numpy").asarray(loss),
    "less": lambda loss: loss < 1,
    "greater": lambda loss: loss > torch.ones(()),
    "truth": bool,
    "sum": lambda loss: 1 + loss,
    "format": lambda loss: f"{loss:.3f}",
    "data": lambda loss: loss.data,
    "detach": lambda loss: loss.detach(),
    "list": lambda loss: loss.tolist(),
    "unpacked": lambda loss: [*loss],
    "most": lambda loss: max(loss, 0),
    "finite": torch.isfinite,
    "product": lambda loss: torch.ones(3).mul_(loss),
    "filled": lambda loss: torch.ones(3).fill_(loss),
    "copied": lambda loss: torch.ones(()).copy_(loss),
    "stacked": lambda loss: torch.stack([loss]),
    "rounded": round,
    "root": lambda loss: __import__("math").sqrt(loss),
    "backward": lambda loss: loss.backward(),
    "pickled": lambda loss: __import__("pickle").dumps(loss),
}


@pytest.mark.parametrize("name", READINGS)
def test_every_way_to_read_it_says_why(name: str) -> None:
    with pytest.raises(ConfigurationError, match=READS):
        READINGS[name](WITHHELD_LOSS)


def test_what_goes_around_torchs_functions_finds_nothing() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(3).add_(torch.ones(3), alpha=WITHHELD_LOSS)
    assert torch.as_tensor(WITHHELD_LOSS) is WITHHELD_LOSS and repr(WITHHELD_LOSS) == "<withheld loss>"


def test_arguments_beside_the_closure(tmp_path: Path) -> None:
    class Given(torch.optim.SGD):
        def step(self, closure: Any = None, **_: Any) -> Any:
            return super().step(closure)

    class Module(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.optimizers().step(**self.given(loss))

        def configure_optimizers(self) -> Optimizer:
            return Given(self.parameters(), lr=0.1)

        def given(self, loss: Tensor) -> dict[str, Any]:
            return {"loss": loss}

    class Number(Module):
        def given(self, loss: Tensor) -> dict[str, Any]:
            return {"loss": loss.item()}

    class Late(Module):
        def given(self, loss: Tensor) -> dict[str, Any]:
            return {"of": lambda: loss}

    class Flags(Module):
        def given(self, loss: Tensor) -> dict[str, Any]:
            return {"verbose": True, "epoch": 3, "mode": "plain", "other": None}

    for module, name in ((Module, "loss"), (Number, "loss"), (Late, "of")):
        with pytest.raises(ConfigurationError, match=rf"Given.step is given {name} .* beside a closure"):
            fit(tmp_path / module.__name__, module(manual=True))
    assert fit(tmp_path / "flags", Flags(manual=True)).releases == 4


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
    for manual in (False, True):
        with pytest.raises(ConfigurationError, match="the optimizer stepped twice on one batch"):
            fit(tmp_path / str(manual), Of(lambda params: Reading(params, lambda _: 1.0, closures=2), manual))


def test_gradients_of_frozen_parameters_are_no_way_around_the_noise(tmp_path: Path) -> None:
    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__(manual=True)
            self.extra = nn.Parameter(torch.zeros(1, 8, 8), requires_grad=False)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            loss = self.loss(batch)
            self.extra.grad = batch[0].mean(0)
            self.manual_backward(loss)
            self.optimizers().step()

    with pytest.raises(UnsupportedModuleError, match="frozen parameter of shape .1, 8, 8. has a gradient"):
        fit(tmp_path, Frozen())


def test_an_optimizer_that_nobody_can_watch(tmp_path: Path) -> None:
    class Stranger:
        def __init__(self, params: Any) -> None:
            inner = self.inner = torch.optim.SGD(params, lr=0.1)
            self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
            self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    class Module(Of):
        def optimizer_zero_grad(self, *_: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Stranger is not a subclass of torch.optim.Optimizer"):
        fit(tmp_path, Module(Stranger))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- trained


class Prodigy(Optimizer):
    """A step size that is found from gradients alone, as D-adaptation does; the closure's loss is handed on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-3, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.param_groups[0]
        for p in group["params"]:
            if p.grad is None:
                continue
            start = self.state[p].setdefault("start", p.clone())
            group["numerator"] += float((p.grad * (start - p)).sum())
        group["d"] = max(group["d"], abs(group["numerator"]) * 1e-2)
        for p in group["params"]:
            if p.grad is not None:
                p.add_(p.grad, alpha=-group["lr"] * group["d"])
        return loss


class ScheduleFree(Optimizer):
    """SGD without a schedule (Defazio et al. 2024): weights of the training mode and of the evaluation mode."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9, "k": 0, "train_mode": True})

    @torch.no_grad()
    def switch(self, train: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["train_mode"]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"])
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                z.sub_(p.grad, alpha=group["lr"])
        return loss


class Switching(Of):
    """Evaluates with the averaged weights."""

    def on_validation_start(self) -> None:
        self.optimizers(use_pl_optimizer=False).switch(False)

    def on_validation_end(self) -> None:
        self.optimizers(use_pl_optimizer=False).switch(True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))


class Sub(torch.optim.Adam):
    """Calls the step of its base class, which is watched too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def of_torch(name: str) -> Callable[[Any], Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, lr=0.01)


TRAINED = {
    **{name: of_torch(name) for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta")},
    "prodigy": Prodigy,
    "wrapper": lambda params: Wrapper(torch.optim.SGD(params, lr=0.1), lambda loss: loss),
    "subclass": Sub,
}


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", TRAINED)
def test_optimizers_that_read_gradients_alone_train(tmp_path: Path, name: str, manual: bool) -> None:
    torch.manual_seed(3)
    module = Of(TRAINED[name], manual)
    before = weights_of(module)
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # whose step is hooked from then on, and called by a subclass's
    assert fit(tmp_path, module).releases == 4
    assert not torch.equal(weights_of(module), before)


def test_schedule_free_optimizers_train(tmp_path: Path) -> None:
    module = Switching(ScheduleFree)
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer = trainer_for(tmp_path, strategy, 12, val_check_interval=2, num_sanity_val_steps=1)
    trainer.fit(module, loader_of(pictures()), torch.utils.data.DataLoader(pictures(9), 3))
    assert strategy.releases == 12


def test_training_without_privacy_is_as_it_was(tmp_path: Path) -> None:
    module = Of(polyak)
    before = weights_of(module)
    trainer_for(tmp_path, NonPrivate(), 4).fit(module, loader_of(pictures()))
    assert not torch.equal(weights_of(module), before)


# ------------------------------------------------------------------------------------------------- float16


@pytest.mark.parametrize("place", ["init", "on_fit_start", "on_train_start"])
def test_parameters_in_float16_are_refused(tmp_path: Path, place: str) -> None:
    module = Classifier()
    if place == "init":
        module.half()
    else:
        setattr(module, place, module.half)
    with pytest.raises(ConfigurationError, match="trained parameters are in float16"):
        fit(tmp_path, module)


def test_frozen_parameters_may_be_in_float16(tmp_path: Path) -> None:
    class Base(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(torch.ones(8, 8, dtype=torch.float16), requires_grad=False)

        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0] * self.base.float(), batch[1]))

    assert fit(tmp_path, Base()).releases == 4
