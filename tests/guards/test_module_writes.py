"""Nothing of a lot may be written into what is saved with the model, in any lot and by any hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from dpbench.data.octaves import is_checked
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.guards._saved import Saved
from dpbench.strategies import DPSGD
from tests.guards.plain_training import plain_training
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for, weights_of

STEPS = 6


class Keeping(Classifier):
    """With a buffer and a second network."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__(manual)
        self.register_buffer("mean", torch.zeros(()))
        self.target = nn.Linear(2, 2).requires_grad_(False)
        self.lots = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lots += 1
        self.look(batch)
        return super().training_step(batch, batch_idx)

    def look(self, batch: Any) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.5)


def fit(folder: Path, module: pl.LightningModule, steps: int = STEPS, **options: Any) -> None:
    torch.manual_seed(3)
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    callbacks = [*options.pop("first", []), strategy, *options.pop("more", [])]
    loader = options.pop("loader", None) or loader_of(pictures())
    validation = DataLoader(pictures(9), 3) if isinstance(module, Keeping) else None
    trainer = trainer_for(folder, strategy, steps, **options, callbacks=callbacks)
    trainer.fit(module, loader, validation)


# ------------------------------------------------------------------------------------------------- in the step


class InExtraState(Keeping):
    """Saved with the model, and no tensor of it."""

    level = 0.0

    def look(self, batch: Any) -> None:
        self.level = 0.9 * self.level + 0.1 * float(batch[0].mean())

    def get_extra_state(self) -> dict[str, float]:
        return {"level": self.level, "always": 1.0}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.level = state["level"]


def test_extra_states_are_compared(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"forward pass changes get_extra_state\(\)"):
        fit(tmp_path, InExtraState())


class InPlace(Keeping):
    def look(self, batch: Any) -> None:
        if self.lots > 1:
            self.mean.mul_(0.9).add_(batch[0].mean())


class Reassigned(Keeping):
    def look(self, batch: Any) -> None:
        if self.lots == 3:
            self.mean = batch[0].mean()


class Weights(Keeping):
    def look(self, batch: Any) -> None:
        if self.lots > 1:
            with torch.no_grad():
                self.target.weight.add_(batch[0].mean())


class PastTheVersion(Keeping):
    """Old code: writes through `.data` are not counted."""

    def look(self, batch: Any) -> None:
        self.mean.data.mul_(0.9).add_(batch[0].mean())


class PastTheVersionLater(Keeping):
    def look(self, batch: Any) -> None:
        if self.lots > 1:
            self.target.weight.data += batch[0].mean()


class PastTheVersionOnce(Keeping):
    """In a batch whose contents are not compared, of what no loss reads."""

    def look(self, batch: Any) -> None:
        if self.lots == 5:
            assert not is_checked(self.lots)
            self.mean.data.copy_(batch[0].mean())


class NewBuffer(Keeping):
    def look(self, batch: Any) -> None:
        if self.lots == 2:
            self.register_buffer("late", batch[0].mean())


class NewModule(Keeping):
    def look(self, batch: Any) -> None:
        if self.lots == 2:
            self.late = nn.Linear(1, 1).requires_grad_(False)


class PersistentMetric(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def look(self, batch: Any) -> None:
        if self.lots > 1:
            self.seen(batch[0])


# ------------------------------------------------------------------------------------------------- in hooks


class AtTheEnd(Keeping):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.copy_(batch[0].mean())


class AtTheEndWeights(Keeping):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(batch[0].mean())


class AtTheStart(Keeping):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.mean.copy_(batch[0].mean())


class OnTransfer(Keeping):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.lots > 1:
            self.mean.copy_(batch[0].mean())
        return batch


class AfterTheStep(Keeping):
    """In manual optimization, behind the update."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.mean.copy_(batch[0].mean())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (InPlace, "changes mean"),
        (Reassigned, "changes mean"),
        (Weights, "changes target.weight"),
        (PastTheVersion, "changes mean"),
        (PastTheVersionLater, "changes target.weight|reads a tensor that training_step has computed"),
        (PastTheVersionOnce, "changes mean"),
        (NewBuffer, "changes late"),
        (NewModule, "changes late.weight, late.bias"),
        (PersistentMetric, "changes seen.mean_value, seen.weight"),
        (AtTheEnd, "mean changed after the release .* on_train_epoch_end"),
        (AtTheEndWeights, "net.0.bias changed after the release"),
        (AtTheStart, "changes mean .or a hook"),
        (OnTransfer, "changes mean .or a hook"),
        (AfterTheStep, "mean changed after the release .* private_module"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_writes_from_records_are_refused(tmp_path: Path, module: Callable[[], Keeping], words: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModuleError), match=words):
        fit(tmp_path, module())


class Writes(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.mean.copy_(batch[0].mean())


class WritesEarly(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.mean.copy_(batch[0].mean())


@pytest.mark.parametrize("place", ["first", "more"])
@pytest.mark.parametrize("callback", [Writes, WritesEarly])
def test_writes_of_other_callbacks_are_refused(tmp_path: Path, callback: type[pl.Callback], place: str) -> None:
    with pytest.raises(UnsupportedModuleError, match="mean"):
        fit(tmp_path, Keeping(), **{place: [callback()]})


# ------------------------------------------------------------------------------------------------- healthy


class Target(Keeping):
    """A slow copy of released weights, as in BYOL."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.target.weight.lerp_(self.net[5].weight[:2, :2], 0.1)


class AtTheEpochsEnd(Keeping):
    def on_train_epoch_end(self) -> None:
        self.mean.add_(1)


class Clamped(Keeping):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                for p in self.net.parameters():
                    p.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(clamp)
        return optimizer


class Metrics(Keeping):
    """Metrics that are not saved; and one that is, of validation data."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss, self.val_mean = MeanMetric(), MeanMetric()
        self.val_mean.persistent(True)

    def look(self, batch: Any) -> None:
        self.train_loss(batch[0].sum())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train_loss(outputs["loss"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_mean(batch[0])
        self.mean.copy_(batch[0].mean())


class ManualPart(Keeping):
    """The network that sees records is named; so what follows its step sees none."""

    private_module = "net"

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.mean.add_(1)
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.1, 0.1)


class Average(pl.Callback):
    """The same slow copy, kept by a callback."""

    def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            module.target.weight.lerp_(module.net[5].weight[:2, :2], 0.1)


@pytest.mark.parametrize("place", ["first", "more"])
@pytest.mark.parametrize("module", [Keeping, Target])
def test_callbacks_may_write_where_no_lot_is_in_sight(
    tmp_path: Path, module: Callable[[], Keeping], place: str
) -> None:
    kept = module()
    before = kept.target.weight.clone()
    fit(tmp_path, kept, **{place: [Average()]})
    assert not torch.equal(kept.target.weight, before)


@pytest.mark.parametrize("place", ["first", "more"])
@pytest.mark.parametrize("module", [InPlace, Weights, AtTheStart, OnTransfer])
def test_writes_of_a_step_are_refused_beside_them(tmp_path: Path, module: Callable[[], Keeping], place: str) -> None:
    with pytest.raises(UnsupportedModuleError, match="forward pass changes"):
        fit(tmp_path, module(), **{place: [Average()]})


@pytest.mark.parametrize("module", [Target, AtTheEpochsEnd, Clamped, Metrics, ManualPart])
def test_what_does_not_come_from_records_may_be_written(tmp_path: Path, module: Callable[[], Keeping]) -> None:
    kept = module()
    before = weights_of(kept.target).clone(), kept.mean.clone()
    fit(tmp_path, kept, 14, val_check_interval=3, num_sanity_val_steps=1)
    if module is Target:
        assert not torch.equal(weights_of(kept.target), before[0])
    if module is AtTheEpochsEnd:
        assert float(kept.mean) == 3
    if module is Metrics:
        assert float(kept.val_mean.compute()) != 0
    assert "on_train_batch_end" not in kept.__dict__ and "on_before_zero_grad" not in kept.__dict__


def saved_of(net: nn.Module, contents: bool = False) -> Saved:
    return Saved(plain_training(net), contents)


def test_what_is_compared() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    saved, whole = saved_of(net), saved_of(net, contents=True)
    assert not saved.written() and not whole.written()
    net[0].weight.data[0, 0] += 1e-6
    assert not saved.written() and whole.written() == ["0.weight"]
    net[1].running_mean.add_(1)
    assert saved.written() == ["1.running_mean"] and sorted(whole.written()) == ["0.weight", "1.running_mean"]
    net[0].bias.data[0] = float("nan")
    again = saved_of(net, contents=True)
    assert not again.written()
    net.extra = nn.Parameter(torch.zeros(1))
    assert saved_of(net).written() == [] and again.written() == ["extra"]
    with torch.inference_mode():
        net.register_buffer("made", torch.zeros(1))
    assert saved_of(net).written() == []


def _swapped(net: nn.Module, name: str) -> None:
    net.__dict__[name] = dict(net.__dict__[name])


STRUCTURES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "same": (lambda net: _swapped(net[1], "_buffers"), []),
    "other buffer": (lambda net: setattr(net[1], "running_mean", torch.zeros(2)), ["1.running_mean"]),
    "other entry": (lambda net: net[1]._buffers.update(running_mean=torch.zeros(2)), ["1.running_mean"]),
    "other dictionary": (
        lambda net: object.__setattr__(net[1], "_buffers", {**net[1]._buffers, "running_var": torch.ones(2)}),
        ["1.running_var"],
    ),
    "other module": (lambda net: net._modules.update({"0": nn.Linear(2, 2)}), ["0.weight", "0.bias"]),
    "other modules": (
        lambda net: net.__dict__.update(_modules={"0": net[0]}),
        ["1.weight", "1.bias", "1.running_mean"],
    ),
    "other name": (lambda net: net._buffers.update(moved=net[1]._buffers.pop("running_mean")), ["moved"]),
    "shared": (lambda net: setattr(net[0], "bias", net[1].bias), ["0.bias"]),
    "no gradient mode": (lambda net: torch.nn.init.ones_(net[0].weight), ["0.weight"]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_a_module_holds_is_listed_anew(name: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    write, names = STRUCTURES[name]
    saved = saved_of(net)
    write(net)
    written = saved.written()
    assert set(names) <= set(written) and bool(names) == bool(written)


def test_contents_are_the_same_for_any_number_of_threads_and_layout() -> None:
    net = nn.Sequential(nn.Linear(2048, 1024), nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    net.small = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
    net.register_buffer("waves", torch.randn(4, dtype=torch.complex64).conj())
    net.register_buffer("back", torch.randn(4, dtype=torch.complex64).conj().imag)
    net.register_buffer("fine", torch.full((2, 2048), 1.5, dtype=torch.float64)[:, ::2])
    net.register_buffer("links", torch.eye(3).to_sparse())
    net.register_buffer("seen", torch.tensor([True, False]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        saved = saved_of(net, contents=True)
        torch.set_num_threads(2)
        assert not saved.written()
    finally:
        torch.set_num_threads(threads)
    net[0].weight.data[7, 7] = torch.nextafter(net[0].weight.data[7, 7], torch.tensor(9.0))  # which a float sum hides
    net.small.data[0, 0] += 1
    net.waves[0].copy_(0)
    net.fine.data *= 2  # an exponent in each of 2,048 doubles: their sum as 64-bit words overflows to itself
    assert sorted(saved.written()) == ["0.weight", "fine", "small", "waves"]


# ------------------------------------------------------------------------------------------------- lots left out


class LeavesOut(Classifier):
    """Small lots are not trained on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if len(batch[0]) < 11 else None


def test_lots_that_are_left_out_are_refused(tmp_path: Path) -> None:
    loader = loader_of(pictures())
    assert any(len(loader.lots.lot(step)) < 11 for step in range(5))
    with pytest.raises(ConfigurationError, match="drawn but never released .on_train_batch_start returned -1"):
        fit(tmp_path, LeavesOut(), 20, loader=loader)
