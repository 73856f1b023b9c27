"""Training without privacy by accident: Fabric, hooks that do not run, two strategies, no strategy, other lots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import pytorch_lightning as pl
import torch

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, NonPrivate
from tests.strategies.worlds import Classifier, fit, loader_of, pictures, trainer_for

FABRICS = pytest.mark.parametrize("fabric", [lightning_fabric.Fabric, lightning.fabric.Fabric])


def private(cls: type[DPSGD] = DPSGD) -> DPSGD:
    return cls(noise_multiplier=1.0, seed=0, delta=1e-3)


@FABRICS
def test_fabric_and_the_callback(fabric: Any) -> None:
    made = fabric(accelerator="cpu", devices=1, callbacks=private())
    module = torch.nn.Linear(4, 2)
    with pytest.raises(ConfigurationError, match="Lightning Fabric does not run the hooks of DPSGD"):
        made.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))


@FABRICS
def test_fabric_and_the_loader(fabric: Any) -> None:
    loader = fabric(accelerator="cpu", devices=1).setup_dataloaders(loader_of(pictures()))
    with pytest.raises(ConfigurationError, match="or in Lightning Fabric, use dpbench.PrivateLoop"):
        next(iter(loader))


def test_a_loader_without_a_strategy(tmp_path: Path) -> None:
    loader = loader_of(pictures())
    with pytest.raises(ConfigurationError, match=r"to look at records, use DataLoader\(loader.dataset\)"):
        next(iter(loader))
    fit(tmp_path, Classifier(), 2, loader=loader)
    with pytest.raises(ConfigurationError, match="hands out batches only to a private training"):
        trainer_for(tmp_path, pl.Callback(), 2).fit(Classifier(), loader)  # a second time, forgotten
    trainer_for(tmp_path, NonPrivate(), 2).fit(Classifier(), loader)  # on purpose


HOOKS = ["setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_before_optimizer_step"]
ALL = [name for name in dir(pl.Callback) if name.startswith("on_train_batch") or name in HOOKS]


@pytest.mark.parametrize(
    ("hooks", "manual"),
    [*(([hook], False) for hook in HOOKS), (HOOKS[-1:], True), (ALL, False)],
    ids=lambda value: ", ".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_hooks_that_are_overridden_without_super(tmp_path: Path, hooks: list[str], manual: bool) -> None:
    cls = type("Forgetful", (DPSGD,), {hook: lambda self, *_, **__: None for hook in hooks})
    with pytest.raises(ConfigurationError, match=r"hook|super\(\)"):
        fit(tmp_path, Classifier(manual), make=cls)


@pytest.mark.parametrize(
    "pair",
    [[private(), private(AdaptiveQuantileClipping)], [private(), NonPrivate()], [NonPrivate(), private()]],
    ids=["private", "not private", "private last"],
)
def test_two_strategies(tmp_path: Path, pair: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match="two strategies, DPSGD and (AdaptiveQuantileClipping|NonPrivate)"):
        trainer_for(tmp_path, pair[0], 4, more=pair[1:]).fit(Classifier(), loader_of(pictures()))


def test_a_strategy_outside_of_a_list() -> None:
    with pytest.raises(ConfigurationError, match=r"give the trainer a list: callbacks=\[DPSGD"):
        list(private())  # type: ignore[call-overload]


class EveryRecord(PrivateBatchSampler):
    """Lots that are not what they say."""

    def lot(self, step: int) -> Any:
        return super().lot(0)


def derived(loader: PrivateDataLoader) -> PrivateDataLoader:
    return PrivateDataLoader(pictures(), EveryRecord(loader.lots.sampling, 0))


def shrunk(loader: PrivateDataLoader) -> PrivateDataLoader:
    loader.dataset.tensors = tuple(x[:30] for x in loader.dataset.tensors)  # type: ignore[attr-defined]
    return loader


@pytest.mark.parametrize(
    ("change", "message"),
    [(derived, "not dpbench's"), (shrunk, "has 30 records, but had 60")],
    ids=["derived", "shrunk"],
)
def test_lots_that_are_not_what_they_say(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(tmp_path, Classifier(), loader=change(loader_of(pictures())))


def test_checkpoints_load_as_lightning_loads_them_by_default(tmp_path: Path) -> None:
    """`torch.load(weights_only=True)`: plain data only, keys included."""
    trainer = trainer_for(tmp_path, private(), 2)
    trainer.fit(Classifier(), loader_of(pictures()))
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    kept = torch.load(tmp_path / "kept.ckpt", weights_only=True)
    assert {type(key) for key in kept["callbacks"]} == {str}
    assert kept["callbacks"]["dpbench.PrivateStrategy"]["releases"] == 2
