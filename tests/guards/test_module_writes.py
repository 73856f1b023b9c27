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

Write = Callable[["Keeping", Any], Any]


class Keeping(Classifier):
    """With a buffer, a second network and metrics; calls writes with a number of the batch, by hook.

    Args:
        first_lot: From which on there are writes.
        writes: Name of a moment → what is written there.
    """

    def __init__(self, first_lot: int = 1, manual: bool = False, **writes: Write) -> None:
        super().__init__(manual)
        self.register_buffer("mean", torch.zeros(()))
        self.target = nn.Linear(2, 2).requires_grad_(False)
        self.seen = MeanMetric()
        self.seen.persistent(True)
        self.lots, self.first_lot, self.writes = 0, first_lot, writes

    def write(self, moment: str, batch: Any) -> None:
        if moment in self.writes and self.lots >= self.first_lot:
            self.writes[moment](self, batch[0].mean())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.lots += 1
        self.write("step", batch)
        loss = super().training_step(batch, batch_idx)
        self.write("update", batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.write("validation", batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.write("start", batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.write("end", batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.write("transfer", batch)
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.5)


def fit(folder: Path, module: pl.LightningModule, steps: int = 6, **options: Any) -> None:
    torch.manual_seed(3)
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    callbacks = [*options.pop("first", []), strategy, *options.pop("more", [])]
    loader = options.pop("loader", None) or loader_of(pictures())
    validation = DataLoader(pictures(9), 3) if isinstance(module, Keeping) else None
    trainer = trainer_for(folder, strategy, steps, **options, callbacks=callbacks)
    trainer.fit(module, loader, validation)


def of_records(module: Keeping, number: Any) -> None:
    module.mean.mul_(0.9).add_(number)


def past_the_version(module: Keeping, number: Any) -> None:
    """Old code: writes through `.data` are not counted."""
    module.mean.data.copy_(number)


class InExtraState(Keeping):
    """Saved with the model, and no tensor of it."""

    def get_extra_state(self) -> dict[str, float]:
        return {"lots": self.lots, "always": 1.0}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.lots = state["lots"]


class BeforeUpdate(Keeping):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.mean.add_(1)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Keeping(5, step=past_the_version), "changes mean"),  # in a batch whose contents are not compared
        (lambda: Keeping(2, step=lambda m, x: m.seen(x)), "changes seen.mean_value, seen.weight"),
        (InExtraState, r"the forward pass .* changes get_extra_state\(\)"),
        (lambda: Keeping(start=of_records), "a hook that sees the batch. changes mean"),
        (lambda: Keeping(transfer=of_records), "a hook that sees the batch. changes mean"),
        (lambda: Keeping(end=of_records), "mean changed after the release .* on_train_epoch_end"),
        (lambda: Keeping(manual=True, update=of_records), "mean changed after the release .* private_module"),
        (lambda: ManualPart(manual=True, end=of_records), "mean changed after the release"),
        (BeforeUpdate, "mean changed between the release of a batch and its update"),
    ],
    ids=[
        "data once",
        "metric",
        "extra state",
        "start",
        "transfer",
        "end",
        "manual",
        "end of a part",
        "before the update",
    ],
)
def test_writes_from_records_are_refused(tmp_path: Path, module: Callable[[], Keeping], words: str) -> None:
    assert not is_checked(5)
    with pytest.raises(UnsupportedModuleError, match=words):
        fit(tmp_path, module())


class Writes(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.mean.copy_(batch[0].mean())


class WritesEarly(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        module.mean.copy_(batch[0].mean())


@pytest.mark.parametrize(("callback", "place"), [(Writes, "more"), (WritesEarly, "first")])
def test_writes_of_other_callbacks_are_refused(tmp_path: Path, callback: type[pl.Callback], place: str) -> None:
    with pytest.raises(UnsupportedModuleError, match="mean"):
        fit(tmp_path, Keeping(), 2, **{place: [callback()]})


# ------------------------------------------------------------------------------------------------- healthy


class Healthy(Keeping):
    """Writes what does not come from records of training, by every hook that may."""

    def __init__(self) -> None:
        super().__init__(
            step=lambda m, x: m.train_loss(x),
            end=lambda m, x: m.train_loss(x),
            validation=lambda m, x: m.seen(x),
        )
        self.train_loss = MeanMetric()  # which is not saved

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """A slow copy of released weights, as in BYOL."""
        with torch.no_grad():
            self.target.weight.lerp_(self.net[5].weight[:2, :2], 0.1)

    def on_train_epoch_end(self) -> None:
        self.mean.add_(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                for p in self.net.parameters():
                    p.clamp_(-0.1, 0.1)

        optimizer.register_step_post_hook(clamp)
        return optimizer


def test_what_does_not_come_from_records_may_be_written(tmp_path: Path) -> None:
    module = Healthy()
    before = weights_of(module.target).clone()
    fit(tmp_path, module, 7, val_check_interval=3, num_sanity_val_steps=1)
    assert not torch.equal(weights_of(module.target), before)
    assert float(module.mean) == 2
    assert float(module.seen.compute()) != 0
    assert "on_train_batch_end" not in module.__dict__ and "on_before_zero_grad" not in module.__dict__


class ManualPart(Keeping):
    """The network that sees records is named; so what follows its step sees none."""

    private_module = "net"


def test_other_networks_may_be_written_after_a_step_by_hand(tmp_path: Path) -> None:
    module = ManualPart(manual=True, update=lambda module, _: module.mean.add_(1))
    fit(tmp_path, module, 3)
    assert float(module.mean) == 3


class Average(pl.Callback):
    """A slow copy that a callback keeps."""

    def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            module.target.weight.lerp_(module.net[5].weight[:2, :2], 0.1)


def test_callbacks_may_write_where_no_lot_is_in_sight(tmp_path: Path) -> None:
    kept = Keeping()
    before = kept.target.weight.clone()
    fit(tmp_path / "healthy", kept, 2, first=[Average()])
    assert not torch.equal(kept.target.weight, before)
    with pytest.raises(
        UnsupportedModuleError, match="the forward pass .* changes mean"
    ):  # which is no cover for a step
        fit(tmp_path, Keeping(2, step=of_records), 3, first=[Average()])


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
    "other dictionary": (
        lambda net: object.__setattr__(net[1], "_buffers", {**net[1]._buffers, "running_var": torch.ones(2)}),
        ["1.running_var"],
    ),
    "other modules": (
        lambda net: net.__dict__.update(_modules={"0": net[0]}),
        ["1.weight", "1.bias", "1.running_mean"],
    ),
    "other name": (lambda net: net._buffers.update(moved=net[1]._buffers.pop("running_mean")), ["moved"]),
    "shared": (lambda net: setattr(net[0], "bias", net[1].bias), ["0.bias"]),
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
    saved = saved_of(net, contents=True)
    torch.set_num_threads(2)  # which the next test sets back
    assert not saved.written()
    torch.set_num_threads(1)
    net[0].weight.data[7, 7] = torch.nextafter(net[0].weight.data[7, 7], torch.tensor(9.0))  # which a float sum hides
    net.small.data[0, 0] += 1
    net.waves[0].copy_(0)
    net.fine.data *= 2  # an exponent in each of 2,048 doubles: their sum as 64-bit words overflows to itself
    assert sorted(saved.written()) == ["0.weight", "fine", "small", "waves"]


# ------------------------------------------------------------------------------------------------- lots left out


class LeavesOut(Classifier):
    """The second lot is not trained on, whatever its records: the key that draws them has PyTorch's version in it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_lots_that_are_left_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="drawn but never released .on_train_batch_start returned -1"):
        fit(tmp_path, LeavesOut(), 5)
