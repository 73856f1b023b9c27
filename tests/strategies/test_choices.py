"""Nothing is chosen by what was measured on private records without noise; looking is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import lightning.pytorch.callbacks
import lightning.pytorch.tuner
import pytest
import pytorch_lightning as pl
import pytorch_lightning.callbacks
import pytorch_lightning.tuner
import torch
from torch.utils.data import DataLoader, Subset

from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, pictures, trainer_for

PACKAGES = {"pytorch_lightning": pytorch_lightning, "lightning": lightning.pytorch}


def module_of(package: Any, where: dict[str, list[str]], schedule: Any = None) -> Any:
    """A module that logs its loss in some hooks under some names."""

    class Logging(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
            self.lr, self.batch_size = 0.1, 12

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.measure("training_step", batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.measure("validation_step", batch)

        def measure(self, hook: str, batch: Any) -> Any:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            for name in where.get(hook, []):
                self.log(name, loss, on_step=hook == "training_step", on_epoch=True, batch_size=1)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            for name in where.get("on_train_batch_end", []):
                self.log(name, 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)}

    return Logging()


def train(folder: Path, package: Any, where: dict[str, list[str]], *callbacks: Any, schedule: Any = None) -> DPSGD:
    private = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    trainer = package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[private, *callbacks],
        enable_checkpointing=any(isinstance(one, package.callbacks.ModelCheckpoint) for one in callbacks),
    )
    trainer.fit(module_of(package, where, schedule), loader_of(pictures(), 20), DataLoader(pictures(), 60))
    return private


class Mine:
    """A callback of a user's own that acts on a metric."""

    def __init__(self, monitor: Any) -> None:
        self.monitor = monitor


def watcher(package: Any, kind: str, monitor: Any, folder: Path) -> Any:
    if kind == "EarlyStopping":
        return package.callbacks.EarlyStopping(monitor, patience=5)
    if kind == "ModelCheckpoint":
        return package.callbacks.ModelCheckpoint(folder / "best", monitor=monitor, save_top_k=2)
    return type("Mine", (Mine, package.Callback), {})(monitor)


def plateau(monitor: Any) -> Any:
    return lambda optimizer: {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": monitor}


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint", "Mine", "ReduceLROnPlateau"])
@pytest.mark.parametrize(
    ("monitor", "where", "message"),
    [
        ("train_loss", {"training_step": ["train_loss"]}, "watches train_loss, which no budget covers"),
        ("loss", {"training_step": ["loss"], "validation_step": ["loss"]}, "watches loss, which no budget covers"),
        ("val_loss", {"training_step": ["val_loss"]}, "watches val_loss, but the training step logs it"),
        ("val_loss_epoch", {"training_step": ["val_loss"]}, "val_loss_epoch, but the training step logs it"),
        ("private/x", {"on_train_batch_end": ["private/x"]}, "private/x, but the training step logs it"),
    ],
)
def test_choices_by_private_records_are_refused(
    tmp_path: Path, package: Any, kind: str, monitor: str, where: Any, message: str
) -> None:
    if kind == "ReduceLROnPlateau":
        callbacks, schedule = [], plateau(monitor)
    else:
        callbacks, schedule = [watcher(package, kind, monitor, tmp_path)], None
    with pytest.raises(ConfigurationError, match=message):
        train(tmp_path, package, where, *callbacks, schedule=schedule)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_several_metrics_of_one_callback(tmp_path: Path, package: Any) -> None:
    with pytest.raises(ConfigurationError, match="Mine watches train_acc"):
        train(tmp_path, package, {}, watcher(package, "Mine", ["val_loss", "train_acc"], tmp_path))


@pytest.mark.filterwarnings("ignore:Skipping val loop", "ignore:Checkpoint directory")
@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_healthy_choices_and_looks(tmp_path: Path, package: Any) -> None:
    where = {"training_step": ["train_loss", "x/loss"], "validation_step": ["val/loss", "valid_acc", "loss/dev"]}
    callbacks = [
        watcher(package, "EarlyStopping", "val/loss", tmp_path),
        watcher(package, "ModelCheckpoint", "valid_acc", tmp_path),
        watcher(package, "Mine", "loss/dev", tmp_path),
        watcher(package, "Mine", "privacy/epsilon", tmp_path),
        watcher(package, "Mine", None, tmp_path),
        package.callbacks.ModelCheckpoint(tmp_path / "all", monitor="step", mode="max"),
    ]
    private = train(tmp_path, package, where, *callbacks, schedule=plateau("val/loss"))
    assert private.releases == 6
    assert list((tmp_path / "best").iterdir())


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
@pytest.mark.parametrize("finder", ["LearningRateFinder", "BatchSizeFinder"])
@pytest.mark.parametrize("by", ["callback", "subclass", "tuner"])
def test_finders_are_refused(tmp_path: Path, package: Any, finder: str, by: str) -> None:
    cls = getattr(package.callbacks, finder)
    cls = type(f"My{finder}", (cls,), {}) if by == "subclass" else cls
    private = DPSGD(noise_multiplier=1.0, delta=1e-3)
    trainer = package.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=False,
        callbacks=[private] if by == "tuner" else [private, cls()],
        enable_checkpointing=False,
        default_root_dir=str(tmp_path),
        enable_progress_bar=False,
    )
    tuner = package.tuner.Tuner(trainer)
    start = {"LearningRateFinder": tuner.lr_find, "BatchSizeFinder": tuner.scale_batch_size}[finder]
    start = start if by == "tuner" else trainer.fit
    module = module_of(package, {})
    module.train_dataloader, module.val_dataloader = lambda: loader_of(pictures()), lambda: DataLoader(pictures(), 60)
    with pytest.raises(ConfigurationError, match=f"{finder} trains on private records without noise"):
        start(module)


def test_nothing_is_released_where_a_choice_is_refused(tmp_path: Path) -> None:
    private = DPSGD(noise_multiplier=1.0, delta=1e-3)
    trainer = trainer_for(tmp_path, private, 4, more=[pl.callbacks.EarlyStopping("train_loss")])
    with pytest.raises(ConfigurationError):
        trainer.fit(module_of(pl, {}), loader_of(pictures()), DataLoader(pictures(), 60))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shared", [48, 10, 0])
def test_what_is_watched_is_measured_on_other_records(shared: int, tmp_path: Path) -> None:
    """A Subset of the training data is known again; looking at it is allowed."""
    records = pictures()
    held_out = Subset(records, [*range(shared)]) if shared else pictures()
    for stopping in ([], [pl.callbacks.EarlyStopping("val/loss")]):
        module = module_of(pytorch_lightning, {"validation_step": ["val/loss"]})
        private = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
        folder = tmp_path / str(len(stopping))
        trainer = trainer_for(folder, private, 9, more=stopping)
        if shared and stopping:
            with pytest.raises(ConfigurationError, match=f"EarlyStopping watches val/loss, and {shared} records of"):
                trainer.fit(module, loader_of(records), DataLoader(held_out, 16))
        else:
            trainer.fit(module, loader_of(records), DataLoader(held_out, 16))


def test_a_training_step_does_not_stop_the_training(tmp_path: Path) -> None:
    module = module_of(pytorch_lightning, {})
    step = module.training_step

    def stopping(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        module.trainer.should_stop |= bool(loss < 100)
        return loss

    module.training_step = stopping
    private = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    with pytest.raises(ConfigurationError, match=r"trainer.should_stop was set during a training step"):
        trainer_for(tmp_path, private, 9).fit(module, loader_of(pictures()), DataLoader(pictures(), 16))
    assert private.releases == 0


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:The lr scheduler dict contains")
def test_a_plateau_in_manual_optimization_follows_nobody_knows_what(tmp_path: Path) -> None:
    module = module_of(pytorch_lightning, {}, plateau("val/loss"))
    module.automatic_optimization = False
    trainer = trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), 2)
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau in manual optimization"):
        trainer.fit(module, loader_of(pictures(), 20))
