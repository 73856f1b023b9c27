"""Training without privacy by accident: Fabric, hooks that do not run, two strategies, no strategy, other lots."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from dpbench.data.lots import LotLoader, Lots
from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, ClipOnly, NonPrivate
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for

FABRICS = [lightning_fabric.Fabric, lightning.fabric.Fabric]


def private(cls: type[DPSGD] = DPSGD, **options: Any) -> DPSGD:
    return cls(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("whole", [True, False])
def test_fabric_and_the_callback(fabric: Any, whole: bool) -> None:
    made = fabric(accelerator="cpu", devices=1, callbacks=private())
    module = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train() -> None:
        if whole:
            made.setup(module, optimizer)
        else:
            model, wrapped = made.setup_module(module), made.setup_optimizers(optimizer)
            made.backward(model(torch.ones(3, 4)).sum())
            wrapped.step()

    with pytest.raises(ConfigurationError, match="Lightning Fabric does not run the hooks of DPSGD"):
        train()


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("move", [True, False])
def test_fabric_and_the_loader(fabric: Any, move: bool) -> None:
    loader = fabric(accelerator="cpu", devices=1).setup_dataloaders(loader_of(pictures()), move_to_device=move)
    with pytest.raises(ConfigurationError, match="Fabric cannot train privately on a LotLoader"):
        next(iter(loader))


def test_a_loader_alone_may_be_looked_at() -> None:
    assert len(list(loader_of(pictures()))) == 5


def test_a_loader_without_a_strategy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="this training on a LotLoader has no private strategy"):
        trainer_for(tmp_path, pl.Callback(), 2).fit(Classifier(), loader_of(pictures()))
    loader = loader_of(pictures())
    trainer_for(tmp_path, private(), 2).fit(Classifier(), loader)
    with pytest.raises(
        ConfigurationError, match="this training on a LotLoader has no private strategy"
    ):  # a second time, forgotten
        trainer_for(tmp_path, pl.Callback(), 2).fit(Classifier(), loader)
    trainer_for(tmp_path, NonPrivate(), 2).fit(Classifier(), loader)  # on purpose


def test_lots_for_evaluation(tmp_path: Path) -> None:
    class Validated(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch))

    trainer = trainer_for(tmp_path, NonPrivate(), 10, limit_val_batches=2)
    trainer.fit(Validated(), DataLoader(pictures(), 12), loader_of(pictures()))
    trainer.validate(Validated(), loader_of(pictures()), verbose=False)


class Forgetful(DPSGD):
    """A strategy of a user's own whose hooks forget super()."""


HOOKS = ["setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_before_optimizer_step"]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_that_is_overridden_without_super(tmp_path: Path, hook: str, manual: bool) -> None:
    cls = type("Forgetful", (DPSGD,), {hook: lambda self, *_, **__: None})
    module = Known(64, manual=manual)
    module.layer = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1))
    with pytest.raises(ConfigurationError, match=r"hook|super\(\)"):
        trainer_for(tmp_path, private(cls), 4).fit(module, loader_of(pictures()))


@pytest.mark.parametrize("loader", ["lots", "plain"])
def test_all_hooks_overridden_without_super(tmp_path: Path, loader: str) -> None:
    hooks = [name for name in dir(pl.Callback) if name.startswith("on_train_batch") or name in HOOKS]
    cls = type("Forgetful", (DPSGD,), {hook: lambda self, *_, **__: None for hook in hooks})
    data = loader_of(pictures()) if loader == "lots" else DataLoader(pictures(), 12)
    with pytest.raises(ConfigurationError, match=r"super\(\)"):
        trainer_for(tmp_path, private(cls), 4).fit(Classifier(), data)


def test_hooks_replaced_on_the_object(tmp_path: Path) -> None:
    strategy = private()
    strategy.on_before_optimizer_step = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=r"super\(\)"):
        trainer_for(tmp_path, strategy, 4).fit(Classifier(), loader_of(pictures()))


def test_a_step_without_a_release_of_its_own(tmp_path: Path) -> None:
    class Twice(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.optimizer.step()

    with pytest.raises(ConfigurationError, match="stepped twice on one release"):
        trainer_for(tmp_path, private(), 4).fit(Twice(manual=True), loader_of(pictures()))


@pytest.mark.parametrize("other", [DPSGD, AdaptiveQuantileClipping, ClipOnly])
def test_two_strategies(tmp_path: Path, other: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"two strategies, DPSGD and {other.__name__}"):
        trainer_for(tmp_path, private(), 4, more=[private(other)]).fit(Classifier(), loader_of(pictures()))


@pytest.mark.parametrize("first", [False, True])
def test_private_and_not(tmp_path: Path, first: bool) -> None:
    pair = [private(), NonPrivate()]
    one, other = reversed(pair) if first else pair
    with pytest.raises(ConfigurationError, match="two strategies, DPSGD and NonPrivate"):
        trainer_for(tmp_path, one, 4, more=[other]).fit(Classifier(), loader_of(pictures()))


def test_two_strategies_by_the_module(tmp_path: Path) -> None:
    class Second(Classifier):
        def configure_callbacks(self) -> Any:
            return [AdaptiveQuantileClipping(noise_multiplier=1.0)]

    with pytest.raises(ConfigurationError, match="two strategies"):
        trainer_for(tmp_path, private(), 4).fit(Second(), loader_of(pictures()))


def test_the_key_of_the_state_is_text_in_a_file() -> None:
    key = private().state_key
    assert type(pickle.loads(pickle.dumps(key))) is str
    assert key == "dpbench.PrivateStrategy"
    assert {"dpbench.PrivateStrategy": 1}[key] == 1


def test_a_strategy_outside_of_a_list() -> None:
    with pytest.raises(ConfigurationError, match=r"give the trainer a list: callbacks=\[DPSGD"):
        list(private())  # type: ignore[call-overload]


class EveryRecord(Lots):
    """Lots that are not what they say."""

    def lot(self, step: int) -> Any:
        return super().lot(0)


def replaced() -> LotLoader:
    loader = loader_of(pictures())
    loader.lots.lot = EveryRecord(loader.lots.sampling, 0).lot  # type: ignore[method-assign]
    return loader


def derived() -> LotLoader:
    loader = loader_of(pictures())
    return LotLoader(pictures(), EveryRecord(loader.lots.sampling, 0))


def shrunk() -> LotLoader:
    loader = loader_of(pictures())
    loader.dataset.tensors = tuple(x[:30] for x in loader.dataset.tensors)  # type: ignore[attr-defined]
    return loader


@pytest.mark.parametrize(
    ("make", "message"),
    [(replaced, "not dpbench's"), (derived, "not dpbench's"), (shrunk, "has 30 records, but had 60")],
)
def test_lots_that_are_not_what_they_say(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer_for(tmp_path, private(), 4).fit(Classifier(), make())


def test_checkpoints_load_as_lightning_loads_them_by_default(tmp_path: Path) -> None:
    """`torch.load(weights_only=True)`: plain data only, keys included."""
    module = Classifier()
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), 4)
    trainer.fit(module, loader_of(pictures()))
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    kept = torch.load(tmp_path / "kept.ckpt", weights_only=True)
    assert {type(key) for key in kept["callbacks"]} == {str}
    assert kept["callbacks"]["dpbench.PrivateStrategy"]["releases"] == 4
    Classifier.load_from_checkpoint(tmp_path / "kept.ckpt")
    again = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), 6)
    again.fit(Classifier(), loader_of(pictures()), ckpt_path=tmp_path / "kept.ckpt")
    assert again.global_step == 6
