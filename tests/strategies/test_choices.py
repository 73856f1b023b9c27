"""Nothing is chosen by what was measured on private records without noise; looking is allowed."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch
import lightning.pytorch.callbacks
import lightning.pytorch.tuner
import pytest
import pytorch_lightning
import pytorch_lightning.callbacks
import pytorch_lightning.tuner
import torch
from torch.utils.data import DataLoader, Subset

from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, pictures, trainer_for

package = pytorch_lightning


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


def private() -> DPSGD:
    return DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)


def train(folder: Path, where: Any, *callbacks: Any, schedule: Any = None) -> int:
    strategy = private()
    saves = any(isinstance(one, package.callbacks.ModelCheckpoint) for one in callbacks)
    trainer = trainer_for(folder, strategy, 6, more=callbacks, enable_checkpointing=saves)
    trainer.fit(module_of(package, where, schedule), loader_of(pictures(), 20), DataLoader(pictures(), 60))
    return strategy.releases


def watcher(kind: str, monitor: Any) -> Any:
    """A callback that acts on a metric: Lightning's, or a user's own."""
    if kind == "Mine":
        return type("Mine", (package.Callback,), {"monitor": monitor})()
    return getattr(package.callbacks, kind)(monitor=monitor)


def plateau(optimizer: Any, monitor: str) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": monitor}


@pytest.mark.parametrize(
    ("kind", "monitor", "where", "message"),
    [
        ("ModelCheckpoint", "train_loss", {"training_step": ["train_loss"]}, "train_loss, which no budget covers"),
        ("Mine", "loss", {"training_step": ["loss"], "validation_step": ["loss"]}, "loss, which no budget covers"),
        ("EarlyStopping", "val_loss_epoch", {"training_step": ["val_loss"]}, "but the training step logs it"),
        ("Mine", "private/x", {"on_train_batch_end": ["private/x"]}, "private/x, but the training step logs it"),
    ],
    ids=["checkpoint", "loss", "stopping", "private"],
)
def test_choices_by_private_records_are_refused(
    tmp_path: Path, kind: str, monitor: Any, where: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train(tmp_path, where, watcher(kind, monitor))
    assert "logs it" in message or not list(tmp_path.iterdir())


def test_a_schedule_by_private_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau watches train_loss, which no budget covers"):
        train(tmp_path, {"training_step": ["train_loss"]}, schedule=partial(plateau, monitor="train_loss"))


@pytest.mark.filterwarnings("ignore:Skipping val loop", "ignore:Checkpoint directory")
def test_healthy_choices_and_looks(tmp_path: Path) -> None:
    where = {"training_step": ["train_loss", "x/loss"], "validation_step": ["val/loss", "valid_acc", "loss/dev"]}
    callbacks = [
        watcher("EarlyStopping", "val/loss"),
        package.callbacks.ModelCheckpoint(tmp_path / "best", monitor="valid_acc"),
        watcher("Mine", "loss/dev"),
        watcher("Mine", "privacy/epsilon"),
    ]
    assert train(tmp_path, where, *callbacks, schedule=partial(plateau, monitor="val/loss")) == 6
    assert list((tmp_path / "best").iterdir())


@pytest.mark.parametrize(
    ("own", "finder", "by"),
    [
        (lightning.pytorch, "LearningRateFinder", "subclass"),
        (pytorch_lightning, "BatchSizeFinder", "callback"),
        (lightning.pytorch, "BatchSizeFinder", "tuner"),
    ],
)
def test_finders_are_refused(tmp_path: Path, own: Any, finder: str, by: str) -> None:
    cls = getattr(own.callbacks, finder)
    if by == "subclass":
        cls = type(f"My{finder}", (cls,), {})
    callbacks = [] if by == "tuner" else [cls()]
    trainer = trainer_for(tmp_path, private(), 4, own, more=callbacks)
    start = own.tuner.Tuner(trainer).scale_batch_size if by == "tuner" else trainer.fit
    module = module_of(own, {})
    module.train_dataloader, module.val_dataloader = lambda: loader_of(pictures()), lambda: DataLoader(pictures(), 60)
    with pytest.raises(ConfigurationError, match=f"{finder} trains on private records without noise"):
        start(module)


@pytest.mark.parametrize("shared", [10, 0])
def test_what_is_watched_is_measured_on_other_records(tmp_path: Path, shared: int) -> None:
    """A Subset of the training data is known again; looking at it is allowed."""
    records = pictures()
    held_out = Subset(records, range(shared)) if shared else pictures()
    loaders = loader_of(records), DataLoader(held_out, 16)
    for stopping in ([], [watcher("EarlyStopping", "val/loss")]):
        trainer = trainer_for(tmp_path / str(len(stopping)), private(), 6, more=stopping)
        refuses = pytest.raises(
            ConfigurationError, match=f"EarlyStopping watches val/loss, but {shared} validation records are"
        )
        with refuses if stopping and shared else nullcontext():
            trainer.fit(module_of(package, {"validation_step": ["val/loss"]}), *loaders)


def test_a_training_step_does_not_stop_the_training(tmp_path: Path) -> None:
    module = module_of(package, {})
    step = module.training_step

    def stopping(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        module.trainer.should_stop |= bool(loss < 100)
        return loss

    module.training_step = stopping
    strategy = private()
    with pytest.raises(ConfigurationError, match=r"trainer.should_stop was set during a training step"):
        trainer_for(tmp_path, strategy, 9).fit(module, loader_of(pictures()), DataLoader(pictures(), 16))
    assert strategy.releases == 0


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:The lr scheduler dict contains")
def test_a_plateau_in_manual_optimization_follows_nobody_knows_what(tmp_path: Path) -> None:
    module = module_of(package, {}, partial(plateau, monitor="val/loss"))
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="ReduceLROnPlateau in manual optimization"):
        trainer_for(tmp_path, private(), 2).fit(module, loader_of(pictures(), 20))
