"""Choices that may not depend on private data without noise: when to stop, which weights to keep, the learning rate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytorch_lightning as pl
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from dpbench.data.records import shared_records
from dpbench.errors import ConfigurationError
from dpbench.guards.guard import LightningGuard
from dpbench.guards.packages import classes

_FINDERS = ("LearningRateFinder", "BatchSizeFinder")
_HELD_OUT = {"val", "valid", "validation", "eval", "dev"}
_COUNTED = {"epoch", "step"}
_REMEDY = (
    "which no budget covers: monitor a metric of validation data (val/…, logged in validation_step) or a private "
    "metric (private/…), or decide in advance"
)


class Choices(LightningGuard):
    """Callbacks, schedules and stops that follow metrics of private records."""

    name = "choices"
    prevents = "early stopping, checkpoint selection or the learning rate depends on private records without noise"

    _stops_already = False

    def on_check(self) -> None:
        """Refuse callbacks."""
        refuse_choices(self.trainer)

    def on_attach(self) -> None:
        """Refuse schedules too."""
        refuse_choices(self.trainer)

    def on_open(self, batch: Any) -> None:
        """Note whether the training ends after this batch anyway."""
        self._stops_already = self.trainer.should_stop

    def on_release(self) -> None:
        """Refuse that a training step stops the training: the records of a batch are in its sight."""
        if self.trainer.should_stop and not self._stops_already:
            raise ConfigurationError(
                "trainer.should_stop was set during a training step, which sees the records of the batch: stopping "
                "must not depend on them. Set max_steps or max_time, or monitor a metric of validation data "
                "(EarlyStopping)."
            )

    def on_close(self) -> None:
        """Refuse choices by metrics that the step has logged."""
        refuse_choices(self.trainer)


def refuse_choices(trainer: pl.Trainer) -> None:
    """Refuse callbacks and schedules that act on metrics of private records.

    Looking at such metrics is allowed (they are not published with the model); a choice that follows them is not.
    A metric's name must say that it is of held-out data, and once there are results, it must not come from a batch.

    Raises:
        ConfigurationError: Names the callback or schedule, the metric and the remedy.
    """
    finders: list[type] = []
    for name in _FINDERS:
        finders += classes(name, "callbacks")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, tuple(finders)):
            raise ConfigurationError(
                f"{type(callback).__name__} trains on private records without noise to choose a setting: choose it on "
                "public data, or in advance, and remove the callback (or Tuner)."
            )
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, ReduceLROnPlateau) and not config.reduce_on_plateau:
            raise ConfigurationError(
                "ReduceLROnPlateau in manual optimization follows any value that it receives, which could come from "
                "private records: use a schedule by steps (StepLR, CosineAnnealingLR), or "
                "automatic optimization with a monitor of validation data."
            )
    choices = list(_watched(trainer))
    logged = _names_from_lots(trainer) if choices else set()
    for watcher, name in choices:
        if not _is_held_out(name):
            raise ConfigurationError(f"{watcher} watches {name}, {_REMEDY}.")
        if name in logged:
            raise ConfigurationError(f"{watcher} watches {name}, but the training step logs it: a metric {_REMEDY}.")


def refuse_training_records(trainer: pl.Trainer, training: Any) -> None:
    """Refuse choices by a metric of validation data among which are training records.

    Args:
        trainer: The trainer, in validation.
        training: The data set of the training.

    Raises:
        ConfigurationError: Names the callback or schedule, and the metric.
    """
    choices = [choice for choice in _watched(trainer) if not _is_released(choice.metric)]
    if not choices:
        return
    watcher, metric = choices[0]
    for loader in tree_leaves(trainer.val_dataloaders):
        shared = shared_records(getattr(loader, "dataset", None), training)
        if shared:
            raise ConfigurationError(
                f"{watcher} watches {metric}, but {shared} validation records are training records, so this metric is "
                "not private: hold records out (torch.utils.data.random_split), or decide in advance."
            )


class _Choice(NamedTuple):
    """A callback or schedule that makes choices, and the name of a metric that it watches."""

    watcher: str
    metric: str


def _watched(trainer: pl.Trainer) -> Iterator[_Choice]:
    """All choices that follow metrics."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        watcher = type(callback).__name__
        monitor = getattr(callback, "monitor", None)
        names = monitor if isinstance(monitor, list | tuple) else [monitor]
        for name in names:
            if isinstance(name, str):
                yield _Choice(watcher, name)
        filename = getattr(callback, "filename", None)
        if isinstance(filename, str):
            for name in re.findall(r"\{([^{}:]+)", filename):
                yield _Choice(f"the filename of {watcher}", name)
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            yield _Choice(type(config.scheduler).__name__, str(config.monitor))


def _is_held_out(name: str) -> bool:
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return _is_released(name) or name.startswith("val") or bool(words & _HELD_OUT)


def _is_released(name: str) -> bool:
    """Return whether a metric says nothing of records beyond the releases."""
    return name.startswith("private/") or name == "privacy/epsilon" or name in _COUNTED


def _names_from_lots(trainer: pl.Trainer) -> set[str]:
    """Metrics that were logged while a batch was processed, under all names that Lightning gives them."""
    results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
    names: set[str] = set()
    for result in results.values():
        meta = result.meta
        if not meta.fx.startswith("on_train_epoch"):
            names |= {meta.name, meta.forked_name(True), meta.forked_name(False)}
    return {name for name in names if not name.startswith("privacy/")}  # ours
