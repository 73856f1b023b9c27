"""The key of a run with a seed, given or kept: a function of all that decides its sums, so that no two share noise.

With one noise under two sums, the difference of two releases is that of the private sums. So the key covers all
that the training is made of, read from its objects, whether a command's configuration or a script has made them:

* the seed,
* the settings of strategy, module, optimizers, schedules, callbacks and collation
  (a callback that only looks on may say so, `observes_only = True`: then a run goes on with or without it),
* the weights in the beginning,
* the contents of the training set,
* the versions of the packages, ours too, and the source of all other classes,
* `RANDOM_NUMBERS`,
* where something of this has no bytes that could be hashed, a key that is drawn for the training and kept until it ends
  (`privacy.kept_keys`). Correlated noise without a seed has it in the place of the seed, and then no callbacks.

The plan of the releases is added where noise and batches are drawn (`ReleaseEngine.lot_key`, `noise_key`). Our own
source is no part of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import PurePath
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

from dpbench.callback.strategy_options import StrategyOptions
from dpbench.canonical import Canonical, digest_of, is_foreign, package_of
from dpbench.code import sources_of, versions
from dpbench.data.contents import contents_of
from dpbench.data.loader import PrivateDataLoader
from dpbench.privacy.randomness import RANDOM_NUMBERS
from dpbench.records.training import Training

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
_INHERITED = {  # attributes that say nothing: parts and parameters, hooks, what a trainer or a schedule sets
    *vars(pl.LightningModule()),
    *vars(torch.optim.SGD([torch.zeros(1)])),
    "step",
}
_OBSERVERS = ("dpbench.", "pytorch_lightning.callbacks.", "lightning.pytorch.callbacks.")
_DECIDING = ("StochasticWeightAveraging", "BackboneFinetuning", "BaseFinetuning")  # callbacks that change a training
_NO_BYTES = (
    "the noise of this training has a random key in addition to its seed, since {gap} cannot be hashed: with other "
    "contents it would get the same noise. Resumed, the training repeats its noise (the key is kept next to the ledger "
    "until it ends); started again, it draws other noise. To repeat it on records in files, name them and their "
    "version: PrivateDataLoader(..., data_id='clinic 2026-11')."
)
Settings = tuple[bytes, Canonical]
"""Hash of a training's parts, without its seed and its data; and the hasher, with gaps and packages."""


class Keys(NamedTuple):
    """The key of a training, or how to make it.

    Attributes:
        key: 128 bits; None where there is no seed, or where it cannot cover everything.
        key_of: The key of the training by a kept key.
        contents: Hash of the training set, for comparison with those of the other processes; None where it does not
            cover all records. It is secret as they are (it would confirm a guess of them), and goes nowhere else.
    """

    key: int | None
    key_of: Callable[[int], int]
    contents: str | None


def settings_of(training: Training, strategy: StrategyOptions) -> Settings:
    """Read the settings of a training from its objects, before anything takes them over or a checkpoint moves them on.

    Args:
        training: A Trainer's, or a plain loop's.
        strategy: What is done with its batches.
    """
    trainer = getattr(training, "trainer", None)
    module = training.module
    parts = [*module.modules()]
    options = {}
    for field in fields(strategy):
        if field.name not in _NOT_IN_SUMS:
            value = getattr(strategy, field.name)
            options[field.name] = _attributes_of(value) if hasattr(value, "__dict__") and not callable(value) else value
    optimizers = []
    for optimizer in training.optimizers:
        groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        optimizers.append([_attributes_of(optimizer), optimizer.defaults, groups])
    schedules = getattr(trainer, "lr_scheduler_configs", ())
    # With a kept key a run goes on without the callback that has interrupted it; other sums, `account` refuses.
    callbacks = [] if strategy.seed is None else filter(_decides, getattr(trainer, "callbacks", ()))
    settings = [
        [type(strategy), options],
        [_attributes_of(part) for part in parts],
        [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        dict(getattr(module, "hparams", {})),
        optimizers,
        [[config.scheduler, config.interval, config.frequency] for config in schedules],
        [_attributes_of(callback) for callback in callbacks],
        _attributes_of(training.datamodule) if is_foreign(type(training.datamodule)) else None,
        str(getattr(trainer, "precision", "32-true")),
    ]
    # Weights have a hash of their own.
    elsewhere = [trainer, strategy, *parts, *module.parameters(), *training.optimizers]
    canonical = Canonical({id(each): b"%32d" % number for number, each in enumerate(elsewhere) if each is not None})
    return canonical.digest(settings), canonical


def weights_digest(module: nn.Module) -> str:
    """Hash of a module's parameters and buffers."""
    return digest_of(dict(module.state_dict()))


def keys_of(
    training: Training, strategy: StrategyOptions, settings: Settings, weights: str, loader: PrivateDataLoader
) -> Keys:
    """Make the key of a training with a seed, or with a kept key, and say once where the seed alone does not do.

    Args:
        training: A Trainer's, or a plain loop's.
        strategy: What is done with its batches.
        settings: Settings of the training.
        weights: Hash of the initial weights.
        loader: Draws the batches; its data set is read.
    """
    seed = strategy.seed
    digest, objects = settings
    collation = objects.digest([loader.collation, loader.record_of_row, loader.lots.members])
    contents, records = contents_of(loader.dataset)
    gaps = objects.gaps + (records.gaps if loader.data_id is None else [])
    sources = sources_of(objects.packages | records.packages)
    facts = [RANDOM_NUMBERS, seed, digest, collation, weights, contents, loader.data_id, versions(), sources]

    def key_of(secret: int) -> int:
        return run_key(secret, facts)

    key = None
    if seed is not None and gaps and strategy.design().private:
        training.inform(_NO_BYTES.format(gap=gaps[0]))
    elif seed is not None:
        key = key_of(seed)
    return Keys(key, key_of, contents if not records.gaps and loader.data_id is None else None)


def run_key(secret: int, facts: Any) -> int:
    """Key of a run.

    Args:
        secret: The seed, or the kept key.
        facts: All else that decides the sums.

    Returns:
        128 bits.
    """
    return int(digest_of([secret, facts])[:32], 16)


def _decides(callback: object) -> bool:
    """Return whether a callback may change a training; ours and Lightning's only observe, as do those that say so."""
    if isinstance(callback, StrategyOptions) or getattr(callback, "observes_only", False) is True:
        return False
    cls = type(callback)
    observes = cls.__module__.startswith(_OBSERVERS)
    return not observes or cls.__name__ in _DECIDING


def _attributes_of(owner: Any) -> list[Any]:
    """Class and attributes of an object, and buffers that `state_dict` leaves out; without contents of files.

    Those of torch and of sources of records without the private ones, which are no settings and move.
    """
    cls = type(owner)
    has_options = isinstance(owner, nn.Module | pl.Callback) and not package_of(cls).startswith("torch")
    attributes = dict(vars(owner))
    for name in getattr(owner, "_non_persistent_buffers_set", ()):
        attributes[f"buffer {name}"] = owner._buffers[name]
    context = attributes.get("_compiler_ctx")
    if isinstance(owner, pl.LightningModule) and isinstance(context, dict):
        # Functions as they were before `torch.compile`: the compiler's state has no bytes, and what it was asked for
        # stands in `_compile_kwargs`.
        attributes |= {name: context[f"original_{name}"] for name in attributes if f"original_{name}" in context}
    settings = {}
    for name, value in sorted(attributes.items()):
        is_option = has_options or is_foreign(cls) or not name.startswith("_")
        if is_option and name not in _INHERITED and not _is_elsewhere(value):
            settings[name] = value
    return [cls, settings]


def _is_elsewhere(value: Any) -> bool:
    """Return whether an attribute says where and how a training runs."""
    if isinstance(value, str):
        return os.path.isabs(value) or (os.sep in value and os.path.exists(value))
    return isinstance(value, PurePath | Logger | DataLoader)
