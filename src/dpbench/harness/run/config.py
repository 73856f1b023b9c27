"""A composed configuration: its declaration, and its check as a whole before anything is built or written.

`Configuration` declares all keys, `TARGETS` the class that each group is built from. Every check that needs no object
is made here; `run.build` makes the objects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter
from typing import Annotated, Any, Literal

import pytorch_lightning as pl
from pydantic import AfterValidator, Field
from pytorch_lightning.loggers.logger import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpbench.errors import ClassNotFound, ConfigurationError, brief, shown
from dpbench.harness.run._checkpoint import seconds_of
from dpbench.harness.run._objective import objectives_of
from dpbench.harness.run.processes import check_processes
from dpbench.harness.run.saved_config import SCHEMA
from dpbench.options import (
    Decay,
    NonNegative,
    Positive,
    PositiveInt,
    Seed,
    check_options,
    checked_value,
    options_of,
    require_group,
)
from dpbench.records.source import RecordSource
from dpbench.session.audit import Audit
from dpbench.strategies import NonPrivate, PrivateStrategy


def _names_a_folder(name: str) -> str:
    if name != name.strip() or name.strip(".") == "" or len(name.encode()) > 150 or re.search(r"[/\\\x00-\x1f]", name):
        raise ValueError
    return name


def _fits_wandb(name: str) -> str:
    if not name.strip() or re.search(r"[/\\#?%:\x00-\x1f]", name):
        raise ValueError
    return name


def _is_duration(text: str) -> str:
    seconds_of(text)
    return text


Name = Annotated[str, AfterValidator(_names_a_folder), "a name of at most 150 letters without slashes"]
Tag = Annotated[str, Field(min_length=1, max_length=64), "a word of at most 64 letters"]
Duration = Annotated[str, AfterValidator(_is_duration), "a duration such as 45m, 2h30m, 1d12h or 1-12:00:00"]
Metric = Annotated[str, Field(pattern=r"^[\w-]+(/[\w.-]+)+$"), "the name of a metric, such as val/accuracy"]
RunPath = Annotated[str, Field(min_length=1), "the folder of a run"]
_PART = r"(last_layer|bias|norm|lora:[1-9]\d*|[\w.*?\[\]!-]*[.*?\[][\w.*?\[\]!-]*)"
TrainableParts = Annotated[
    str,
    Field(pattern=rf"^{_PART}(\+{_PART})*$"),
    "last_layer, bias, norm, lora:8 (or another rank), a parameter's name, a pattern (*head*), or several joined by +",
]
Schema = Annotated[int, Field(ge=SCHEMA, le=SCHEMA), f"left as it is: {SCHEMA}"]
_WandbName = Annotated[str, Field(max_length=128), AfterValidator(_fits_wandb), "a name without any of / \\ # ? % :"]
_Limit = Annotated[Literal[-1] | PositiveInt, "a positive whole number, or -1 for no limit"]
_PositiveNumber = Annotated[int | float, Field(gt=0)]
_TRAINER_OPTIONS: dict[str, Any] = {
    "max_steps": _Limit,
    "max_epochs": _Limit | None,
    "devices": Annotated[
        Literal["auto", -1] | PositiveInt | list[int],
        "a whole number of at least 1, a list of the numbers of GPUs, or auto for all of them",
    ],
    "log_every_n_steps": PositiveInt,
    "check_val_every_n_epoch": PositiveInt | None,
    "val_check_interval": Annotated[
        _PositiveNumber | str | dict[str, Any] | None,
        "a whole number of batches of at least 1, or a share of an epoch above 0",
    ],
    "limit_train_batches": Annotated[_PositiveNumber, "a number above 0 (trainer.max_steps ends a run)"] | None,
}
"""Annotations that say more than those of Lightning."""


@dataclass(frozen=True)
class Target:
    """A group that is built from a class, which checks the group's options.

    Attributes:
        bases: One of these, or a subclass.
        reserved: Options that the harness passes.
        narrower: Annotations that say more than those of the class.
        methods: Names of the methods that it must have, where it needs no base class.
        without: The group's choice that names no class; None: there is none.
        is_complete: True if options without a default must be given; False if the harness adds some, such as the number
            of classes, which it knows from the data.
    """

    bases: tuple[type, ...]
    reserved: Collection[str] = ()
    narrower: Mapping[str, Any] = field(default_factory=dict)
    methods: Collection[str] = ()
    without: str | None = None
    is_complete: bool = True

    def class_of(self, options: Mapping[str, Any], group: str) -> type:
        """Import the class behind `_target_`; nothing else is imported by name, and nothing but such a class is called.

        Args:
            options: Options of the group.
            group: Path of the group, for messages.

        Raises:
            ConfigurationError: There is none, it cannot be imported, or is no class of the right kind.
        """
        path = options.get("_target_")
        module, _, name = str(path).rpartition(".")
        try:
            cls = getattr(import_module(module), name)
        except Exception as error:  # a user's own file may raise whatever it likes
            raise ClassNotFound(f"{group}._target_={shown(path)} is not an importable class: {brief(error)}") from error
        is_class = isinstance(cls, type) and issubclass(cls, self.bases)
        if not is_class or not all(callable(getattr(cls, method, None)) for method in self.methods):
            kinds = " or ".join(base.__name__ for base in self.bases if base is not object)
            needed = f"{kinds} or a subclass" if kinds else f"a class with the methods {', '.join(self.methods)}"
            raise ConfigurationError(f"{group}._target_={path} must be {needed}.")
        found: type = cls
        return found

    def check(self, options: Mapping[str, Any], group: str) -> None:
        """Refuse a class of another kind, and options that it does not take.

        Raises:
            ConfigurationError: One line that names the first wrong key.
        """
        if self.without is not None and options.get("_target_", "") is None:
            return
        cls = self.class_of(options, group)
        own = {name: value for name, value in options.items() if name not in ("_target_", "_partial_")}
        check_options(cls, own, group, self.reserved, self.narrower, self.is_complete)


OPTIMIZER = Target((Optimizer,), {"params"}, {"lr": Positive}, without="none")
SCHEDULE = Target((LRScheduler,), {"optimizer"}, {"gamma": NonNegative}, without="constant")
PART = Target((Optimizer, LRScheduler), {"params", "optimizer"}, {**OPTIMIZER.narrower, **SCHEDULE.narrower})
"""Options of a module from which it makes optimizers and schedules of its own."""
CALLBACK = Target((pl.Callback,))
LOGGER = Target((Logger,), is_complete=False)
SWEEPER = Target((object,), methods=("directions", "search"))
"""A sweeper that chooses trials by the values of earlier ones, as `OptunaSweeper`."""
_METHODS = [name for name, member in vars(RecordSource).items() if callable(member) and not name.startswith("_")]


@dataclass
class _Run:
    name: Name
    group: Name
    tags: list[Tag]
    checkpoint_every_n_steps: PositiveInt
    resume: bool
    schema: Schema
    max_time: Duration | None = None


@dataclass
class _Engine:
    native: Literal["auto", "on", "off"] = "auto"
    kernels: Name = "none"
    keep_memory: bool = True


@dataclass
class Wandb:
    """Settings of `logger` that are those of wandb; other loggers are groups of their own in it."""

    wandb: bool = False
    mode: Literal["auto", "online", "offline"] = "auto"
    project: _WandbName = "dpbench"
    entity: _WandbName | None = None
    notes: str | None = None
    checkpoint: bool = False


@dataclass
class _Diagnostics:
    every_n_steps: PositiveInt | None
    training_records: PositiveInt | None = None


Group = Annotated[dict[str, Any], "a group of settings (KEY=VALUE)"]


@dataclass
class Configuration:
    """The keys of a configuration, as `conf/config.yaml` and the groups' files compose them.

    Those with a default are absent from configurations of older runs.
    """

    data: Group
    model: Group
    module: Group
    strategy: Group
    optimizer: Group
    schedule: Group
    trainer: Group
    run: _Run
    logger: Group
    diagnostics: _Diagnostics
    seed: Seed
    callbacks: Group
    records: Group = field(default_factory=dict)
    audit: Group = field(default_factory=dict)
    engine: _Engine = field(default_factory=_Engine)
    after: RunPath | None = None
    trainable: TrainableParts | None = None
    ema_decay: Decay | None = None
    objective: Metric | list[Metric] | None = None
    # Choices of Hydra, which may stand in the configuration of a run that is to be resumed.
    launcher: Any = None
    experiment: Any = None


TARGETS: Mapping[str, Target] = {
    "data": Target((pl.LightningDataModule,), {"seed"}),
    "model": Target((nn.Module,), without="none", is_complete=False),
    "module": Target(
        (pl.LightningModule,),
        {"model", "optimizer", "monitored", "schedule"},
        is_complete=False,
    ),
    "strategy": Target(
        (PrivateStrategy, NonPrivate),
        {"seed", "ledger", "after", "fingerprint", "records", "audit"},
    ),
    "optimizer": OPTIMIZER,
    "schedule": SCHEDULE,
    "trainer": Target(
        (pl.Trainer,),
        {"logger", "callbacks", "default_root_dir", "use_distributed_sampler", "fast_dev_run"},
        _TRAINER_OPTIONS,
    ),
    "records": Target((object,), methods=_METHODS, without="none"),
    "audit": Target((Audit,), without="none"),
}
"""Group → class that it is built from."""


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a wrong configuration, as far as that shows without building anything.

    Args:
        config: Resolved, as plain data.

    Raises:
        ConfigurationError: One line that names the first wrong key, and the values that it takes.
    """
    check_options(Configuration, config, group="", is_complete=True)
    for group, target in TARGETS.items():
        chosen = dict(config.get(group, {"_target_": None}))  # a run is older than some
        if group == "module":
            for name, part in parts_of_module(chosen).items():
                PART.check(part, f"module.{name}")
                if name in options_of(target.class_of(chosen, group)):
                    del chosen[name]
        elif group == "strategy":
            checked_value(bool, chosen.pop("secure", False), "strategy.secure")
            # The baseline of a private run is that run with strategy=none, which leaves its options alone.
            if issubclass(target.class_of(chosen, group), NonPrivate):
                continue
        target.check(chosen, group)
    if "seed" not in options_of(class_of(config["data"], "data")):
        raise ConfigurationError(
            f"data._target_={config['data']['_target_']} takes no seed, so its batches could not be repeated: add an "
            "option seed, for PrivateDataLoader.poisson(dataset, expected_batch_size, seed=seed)."
        )
    for name, options in other_loggers(config).items():
        LOGGER.check(options, f"logger.{name}")
    of_wandb = {name: value for name, value in config["logger"].items() if not isinstance(value, Mapping)}
    check_options(Wandb, of_wandb, "logger")
    for name, options in config["callbacks"].items():
        if options is None:
            continue
        group = f"callbacks.{name}"
        if issubclass(CALLBACK.class_of(require_group(options, group), group), PrivateStrategy | NonPrivate):
            raise ConfigurationError(f"{group} is a strategy, of which a run has only one: choose it by strategy=NAME.")
        CALLBACK.check(options, group)
    _check_parts(config)
    _check_end(config["trainer"], config["strategy"])
    check_processes(config["trainer"])
    objectives_of(config)


def class_of(options: Mapping[str, Any], group: str) -> type:
    """Import the class of a group, see `Target.class_of`."""
    return TARGETS[group].class_of(options, group)


def uses_wandb(config: Mapping[str, Any]) -> bool:
    """Tell whether a run is logged to wandb."""
    return bool(config["logger"].get("wandb"))


def other_loggers(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """List the options of each logger that the configuration adds by its class."""
    return {name: options for name, options in config["logger"].items() if isinstance(options, Mapping)}


def parts_of_module(options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """List the options of a module from which an optimizer or a schedule of its own is made: groups with a class."""
    return {name: part for name, part in options.items() if isinstance(part, Mapping) and "_target_" in part}


def _check_parts(config: Mapping[str, Any]) -> None:
    """Refuse a model, optimizer or schedule that the module would leave aside, or lack."""
    cls = class_of(config["module"], "module")
    options = options_of(cls)
    for part in ("model", "optimizer", "schedule"):
        is_chosen = config[part].get("_target_") is not None
        without = f"{part}={TARGETS[part].without}"
        if is_chosen and part not in options:
            raise ConfigurationError(f"{cls.__name__} takes no {part}: choose {without}.")
        if not is_chosen and part in options and options[part].default is Parameter.empty:
            raise ConfigurationError(f"{cls.__name__} needs one: choose another {part} than {without}.")


def _check_end(trainer: Mapping[str, Any], strategy: Mapping[str, Any]) -> None:
    """Refuse a run that would not end."""
    limits = {trainer.get("max_steps"), trainer.get("max_epochs"), trainer.get("max_time")} - {-1, None}
    has_budget = strategy.get("target_epsilon") is not None and strategy.get("noise_multiplier") is not None
    if not limits and not has_budget:
        raise ConfigurationError(
            "no stopping criterion: set trainer.max_steps or trainer.max_epochs (or strategy.target_epsilon in "
            "addition to the noise)."
        )
