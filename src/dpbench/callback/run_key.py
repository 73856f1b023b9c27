"""The key of a run with a seed, given or kept: a function of all that decides its sums, so that no two share noise.

With one noise under two sums, the difference of two releases is that of the private sums. So the key covers what the
training is made of, read from its objects, whoever has made them (a command's configuration or a script):

* the seed (correlated noise without one: the key that is kept for it, and then no callbacks),
* the settings of strategy, module, optimizers, schedules, callbacks and collation, without those at their defaults
  (a callback that only looks on may say so, `observes_only = True`: then a run goes on with or without it),
* the weights in the beginning,
* the contents of the training set,
* the versions of the packages, ours too, and the source of everybody else's classes,
* `RANDOM_NUMBERS`.

The plan of the releases is added where noise and lots are drawn (`ReleaseEngine.lot_key`, `noise_key`). Our own source
is no part of it.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dpbench.callback.strategy_options import StrategyOptions
from dpbench.canonical import Canonical, digest_of, is_default, is_foreign
from dpbench.code import sources_of, versions
from dpbench.data.contents import contents_of
from dpbench.data.lots import LotLoader
from dpbench.privacy.randomness import RANDOM_NUMBERS
from dpbench.records.training import Training

_PLAIN = (type(None), bool, int, float, str, bytes)
_WORDS = (
    enum.Enum,
    type,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.Size,
)
_ELSEWHERE = (  # covered by another part of the key, or where and how a training runs
    PurePath,
    nn.Module,
    pl.Trainer,
    Logger,
    DataLoader,
    Dataset,
    pl.LightningDataModule,
)
_NO_SETTING = {"training"}  # of modules
_OF_MODULES = {*vars(nn.Module()), *vars(pl.LightningModule())}  # parameters, hooks, what the trainer sets
_NOT_IN_SUMS = {  # of strategies: where and how long, not what is released; noise and bounds are in the plan
    "seed",
    "ledger",
    "after",
    "fingerprint",
    "noise",
    "bands",
    "noise_multiplier",
    "target_epsilon",
    "delta",
    "accountant",
    "max_physical_batch_size",
    "executor",  # the one that carries out a training is in the keys of its releases
}
_OBSERVERS = ("dpbench.", "pytorch_lightning.callbacks.", "lightning.pytorch.callbacks.")
_DECIDING = ("StochasticWeightAveraging", "BackboneFinetuning", "BaseFinetuning")  # callbacks that change a training


class Settings(NamedTuple):
    """What a training is made of, but for its seed and its data.

    Attributes:
        digest: Of all settings.
        classes: Of which it is made, whose source is part of the key.
    """

    digest: str
    classes: frozenset[Any]


def settings_of(training: Training, strategy: StrategyOptions) -> Settings:
    """Read the settings of a training from its objects, before anything takes them over or a checkpoint moves them on.

    Args:
        training: A Trainer's, or a plain loop's.
        strategy: What is done with its lots.
    """
    trainer = getattr(training, "trainer", None)
    module = training.module
    parts = [part for _, part in module.named_modules()]
    loss = None
    if trainer is None:
        # A Trainer's module has it among its attributes.
        loss = getattr(module, "loss", None)
    hparams = getattr(module, "hparams", {})
    schedules = getattr(trainer, "lr_scheduler_configs", ())
    callbacks = []
    for callback in getattr(trainer, "callbacks", ()):
        # With a kept key a run goes on without the callback that has interrupted it; other sums, `account` refuses.
        if strategy.seed is not None and _decides(callback):
            callbacks.append(callback)
    precision = getattr(trainer, "precision", "32-true")
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    settings = {
        "strategy": _options_of(strategy),
        "module": [_attributes_of(part) for part in parts],
        "loss": loss,
        "hparams": dict(hparams),
        "optimizers": [_optimizer(optimizer) for optimizer in training.optimizers],
        "schedules": [_schedule(config) for config in schedules],
        "callbacks": [_attributes_of(callback) for callback in callbacks],
        "data module": _data_module(training.datamodule),
        "precision": str(precision),
    }
    if len(trainable) < len(list(module.parameters())):
        # The plan knows sizes alone: two layers of one size, each trained in a run, must not share noise.
        settings["trainable"] = trainable
    canonical = Canonical()
    digest = canonical.digest(settings).hex()
    objects = [
        *training.optimizers,
        *training.schedulers,
        *parts,
        *callbacks,
        strategy,
    ]
    classes = {*canonical.classes, *map(type, objects)}
    return Settings(digest, frozenset(classes))


def weights_digest(module: nn.Module) -> str:
    """Hash of a module's parameters and buffers."""
    return digest_of(dict(module.state_dict()))


def run_key(
    seed: int,
    settings: Settings,
    weights: str,
    loader: LotLoader,
) -> tuple[int, str]:
    """Key of a run with a seed, or with a kept key.

    Args:
        seed: As it was given, or the kept key.
        settings: Of the training.
        weights: Hash of those that it began with.
        loader: Draws the lots; its data set is read.

    Returns:
        128 bits; and the hash of the training set, for comparison with those of the other processes. It is secret as
        the records are (it would confirm a guess of them), and goes nowhere else.

    Raises:
        ConfigurationError: The records are not in memory, and have no `data_id`.
    """
    contents, classes = contents_of(loader.dataset, loader.data_id)
    collation = Canonical()
    collated = collation.digest([loader.collation, loader.record_of_row]).hex()
    all_classes = {*settings.classes, *classes, *collation.classes}
    sources = sources_of(all_classes)
    determinants = [
        RANDOM_NUMBERS,
        seed,
        settings.digest,
        collated,
        weights,
        contents,
        versions(),
        sources,
    ]
    if loader.lots.members is not None:
        # The data set holds those too that are not trained on.
        determinants.append(loader.lots.members)
    digits = digest_of(determinants)[:32]
    return int(digits, 16), contents


def _decides(callback: object) -> bool:
    """Whether a callback may change a training; ours and Lightning's look on, and those that say so."""
    if isinstance(callback, StrategyOptions) or getattr(callback, "observes_only", False) is True:
        return False
    cls = type(callback)
    observes = cls.__module__.startswith(_OBSERVERS)
    return not observes or cls.__name__ in _DECIDING


def _options_of(options: StrategyOptions) -> dict[str, Any]:
    """A strategy's options that are not at their defaults."""
    described: dict[str, Any] = {"class": type(options)}
    for field in sorted(fields(options), key=lambda field: field.name):
        value = getattr(options, field.name)
        if field.name in _NOT_IN_SUMS or is_default(value, field.default):
            continue
        described[field.name] = _setting(value)
    return described


def _setting(value: Any) -> Any:
    """An option as it was given: of an object its public attributes."""
    if _is_setting(value) or not hasattr(value, "__dict__"):
        return value
    return _attributes_of(value)


def _attributes_of(owner: Any) -> list[Any]:
    """Class and attributes of an object; not what lies in files.

    Of libraries' and our own objects the public ones, as far as they are plain; of others' all, whatever they hold, and
    buffers that `state_dict` leaves out.
    """
    cls = type(owner)
    foreign = is_foreign(cls)
    attributes = {}
    for name, value in vars(owner).items():
        if foreign:
            is_part = name not in _OF_MODULES and not _is_elsewhere(value)
        else:
            is_part = name not in _NO_SETTING and not name.startswith("_") and _is_setting(value)
        if is_part:
            attributes[name] = value
    if isinstance(owner, nn.Module):
        for name in owner._non_persistent_buffers_set:
            attributes[f"buffer {name}"] = owner._buffers[name]
    by_name = dict(sorted(attributes.items()))
    return [cls, by_name]


def _is_elsewhere(value: Any) -> bool:
    """Whether an attribute is covered elsewhere, or says where and how a training runs."""
    if isinstance(value, str):
        return _is_path(value)
    return isinstance(value, _ELSEWHERE)


def _is_path(word: str) -> bool:
    return os.path.isabs(word) or (os.sep in word and os.path.exists(word))


def _is_setting(value: Any) -> bool:
    if isinstance(value, str):
        return not _is_path(value)
    if isinstance(value, PurePath):
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_setting, value))
    if isinstance(value, Mapping):
        names_are_settings = all(map(_is_setting, value.keys()))
        return names_are_settings and all(map(_is_setting, value.values()))
    if isinstance(value, partial):
        components = [value.func, *value.args, *value.keywords.values()]
        return _is_setting(components)
    return isinstance(value, (*_PLAIN, *_WORDS))


def _optimizer(optimizer: Any) -> list[Any]:
    groups = []
    for group in optimizer.param_groups:
        options = dict(group)
        options.pop("params", None)
        groups.append(_settings(options))
    defaults = _settings(optimizer.defaults)
    return [type(optimizer), defaults, groups]


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    settings = {}
    for name, value in sorted(options.items()):
        if _is_setting(value) or torch.is_tensor(value):
            settings[name] = value
    return settings


def _schedule(config: Any) -> list[Any]:
    state = dict(vars(config.scheduler))
    state.pop("optimizer", None)
    return [
        type(config.scheduler),
        _settings(state),
        config.interval,
        config.frequency,
    ]


def _data_module(module: pl.LightningDataModule | None) -> list[Any] | None:
    """Of a module that is not ours, which may still change what its loader hands out."""
    if module is None or type(module).__module__.startswith("dpbench."):
        return None
    return _attributes_of(module)
