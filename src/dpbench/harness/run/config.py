"""A composed configuration: what it may hold, and its check as a whole before anything is made of it or written.

`Configuration` declares all keys; `TARGETS` says what class each group is built from. Everything that can be said
without making an object is said here; `run.build` makes the objects.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Annotated, Any, Literal, get_args, get_origin

import pytorch_lightning as pl
from hydra.utils import get_class
from pydantic import AfterValidator, Field
from pytorch_lightning.loggers.logger import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpbench.errors import ClassNotFound, ConfigurationError, brief
from dpbench.harness.run._checkpoint import seconds_of
from dpbench.harness.run._objective import objective_of
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
    shown,
)
from dpbench.privacy.canaries.canaries import GradientCanaries
from dpbench.records.source import RecordSource
from dpbench.strategies import NonPrivate, PrivateStrategy

_MARKS = ("_target_", "_partial_")


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
TrainableParts = Annotated[
    str,
    Field(pattern=r"^(last_layer|bias|lora:[1-9]\d*)(\+(last_layer|bias|lora:[1-9]\d*))*$"),
    "last_layer, bias, lora:8 (or another rank), or several of them joined by +",
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
        "a whole number from 1 on, a list of the numbers of GPUs, or auto for all of them",
    ],
    "log_every_n_steps": PositiveInt,
    "check_val_every_n_epoch": PositiveInt | None,
    "val_check_interval": Annotated[
        _PositiveNumber | str | dict[str, Any] | None,
        "a whole number of lots from 1 on, or a share of an epoch above 0",
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
        protocol: Which it must follow, where that is no base class.
        without: The group's choice that names no class; None: there is none.
        is_complete: Whether options without a default must be there; else the harness adds some, such as the number
            of classes, that it knows from the data.
    """

    bases: tuple[type, ...]
    reserved: Collection[str] = ()
    narrower: Mapping[str, Any] | None = None
    protocol: type | None = None
    without: str | None = None
    is_complete: bool = True

    def class_of(self, options: Mapping[str, Any], group: str) -> type:
        """Import the class behind `_target_`; nothing else is imported by name, and nothing but such a class is called.

        Args:
            options: Of the group.
            group: Its path, for messages.

        Raises:
            ConfigurationError: There is none, it cannot be imported, or is no class of the right kind.
        """
        path = options.get("_target_")
        if not isinstance(path, str) or not path.strip():
            raise ConfigurationError(
                f"{group}._target_ must name a class ({self._kinds()}, or a subclass), not {shown(path)}."
            )
        try:
            # Hydra would say in four lines what is said below in one.
            logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
            cls = get_class(path)
        except Exception as error:
            # A user's own file may raise whatever it likes.
            module, _, name = path.rpartition(".")
            why = f"{module} has no {name}" if module in sys.modules else brief(error.__cause__ or error)
            raise ClassNotFound(f"{group}._target_={shown(path)} is not an importable class: {why}") from error
        if not self._accepts(cls):
            raise ConfigurationError(f"{group}._target_={path} must be {self._kinds()}, or a subclass.")
        return cls

    def check(self, options: Mapping[str, Any], group: str) -> None:
        """Refuse a class of another kind, and options that it does not take.

        Raises:
            ConfigurationError: One line that names the first wrong key.
        """
        if self.without is not None and options.get("_target_", "") is None and not options.keys() - {*_MARKS}:
            return
        cls = self.class_of(options, group)
        if options.get("_partial_", True) is not True:
            raise ConfigurationError(f"{group}._partial_ must be true: its first argument comes later.")
        own = {name: value for name, value in options.items() if name not in _MARKS}
        self._check_own(cls, own, group)

    def _check_own(self, cls: type, options: dict[str, Any], group: str) -> None:
        """Check options of the class itself."""
        for name in options:
            if name.startswith("_"):
                raise ConfigurationError(f"there is no key {group}.{name}.")
        check_options(cls, options, group, self.reserved, self.narrower, self.is_complete)

    def _kinds(self) -> str:
        """Say what a class has to be."""
        if self.protocol is not None:
            return f"{self.protocol.__module__}.{self.protocol.__name__}"
        return " or ".join(f"{base.__module__.split('.')[0]}'s {base.__name__}" for base in self.bases)

    def _accepts(self, cls: type) -> bool:
        if not issubclass(cls, self.bases):
            return False
        for name, member in vars(self.protocol or object).items():
            if not name.startswith("_") and callable(member) and not callable(getattr(cls, name, None)):
                return False
        return True


class _DataTarget(Target):
    def _check_own(self, cls: type, options: dict[str, Any], group: str) -> None:
        if "seed" not in options_of(cls):
            raise ConfigurationError(
                f"{group}._target_={cls.__module__}.{cls.__name__} takes no seed, and its lots could not be repeated: "
                "give it an option seed, for LotLoader.poisson(dataset, expected_batch_size, seed=seed)."
            )
        super()._check_own(cls, options, group)


class _ModuleTarget(Target):
    def _check_own(self, cls: type, options: dict[str, Any], group: str) -> None:
        for name, target in parts_of_module(cls).items():
            part = options.pop(name, None)
            if part is not None:
                target.check(require_group(part, f"{group}.{name}"), f"{group}.{name}")
        super()._check_own(cls, options, group)


class _StrategyTarget(Target):
    def _check_own(self, cls: type, options: dict[str, Any], group: str) -> None:
        checked_value(bool, options.pop("secure", False), f"{group}.secure")
        # The baseline of a private run is that run with strategy=none, which leaves its options alone.
        if not issubclass(cls, NonPrivate):
            super()._check_own(cls, options, group)


class _CallbackTarget(Target):
    def _check_own(self, cls: type, options: dict[str, Any], group: str) -> None:
        if issubclass(cls, PrivateStrategy | NonPrivate):
            raise ConfigurationError(f"{group} is a strategy, and a run has one: choose it by strategy=NAME.")
        super()._check_own(cls, options, group)


OPTIMIZER = Target((Optimizer,), {"params"}, {"lr": Positive}, without="none")
SCHEDULE = Target((LRScheduler,), {"optimizer"}, {"gamma": NonNegative}, without="constant")
CALLBACK = _CallbackTarget((pl.Callback,))
LOGGER = Target((Logger,), is_complete=False)


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
    objective: Metric | None = None
    # Choices of Hydra, which may stand in the configuration of a run that is to be resumed.
    launcher: Any = None
    experiment: Any = None


TARGETS: Mapping[str, Target] = {
    "data": _DataTarget((pl.LightningDataModule,), {"seed"}),
    "model": Target((nn.Module,), without="none", is_complete=False),
    "module": _ModuleTarget(
        (pl.LightningModule,),
        {"model", "optimizer", "monitored", "schedule"},
        is_complete=False,
    ),
    "strategy": _StrategyTarget(
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
    "records": Target((object,), protocol=RecordSource, without="none"),
    "audit": Target((GradientCanaries,), without="none"),
}
"""Group → what class it is built from."""


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that cannot be meant: whatever can be said without making anything of it.

    Args:
        config: Resolved, as plain data.

    Raises:
        ConfigurationError: One line that names the first wrong key, and what it takes.
    """
    check_options(Configuration, config, group="", is_complete=True)
    for group, target in TARGETS.items():
        if group in config:  # a run is older than some
            target.check(config[group], group)
    for name, options in other_loggers(config).items():
        LOGGER.check(options, f"logger.{name}")
    of_wandb = {name: value for name, value in config["logger"].items() if not isinstance(value, Mapping)}
    check_options(Wandb, of_wandb, "logger")
    for name, options in config["callbacks"].items():
        if options is not None:
            CALLBACK.check(require_group(options, f"callbacks.{name}"), f"callbacks.{name}")
    _check_parts(config)
    _check_end(config["trainer"], config["strategy"])
    check_processes(config["trainer"])
    objective_of(config)


def class_of(options: Mapping[str, Any], group: str) -> type:
    """Import the class of a group, see `Target.class_of`."""
    return TARGETS[group].class_of(options, group)


def uses_wandb(config: Mapping[str, Any]) -> bool:
    """Tell whether a run is logged to wandb."""
    return bool(config["logger"].get("wandb"))


def other_loggers(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """List the options of each logger that the configuration adds by its class."""
    return {name: options for name, options in config["logger"].items() if isinstance(options, Mapping)}


def parts_of_module(cls: type) -> dict[str, Target]:
    """List the options that a module calls to make an optimizer or a schedule; each is a group with a `_target_`.

    Their annotations say so, such as `Callable[[Iterable[nn.Parameter]], Optimizer]`.
    """
    parts = {}
    for name, option in options_of(cls).items():
        for hint in (option.annotation, *get_args(option.annotation)):
            result = get_args(hint)[-1] if get_origin(hint) is Callable and get_args(hint) else None
            for target in (OPTIMIZER, SCHEDULE):
                if isinstance(result, type) and issubclass(result, target.bases):
                    parts[name] = target
    # The module's own groups are made from groups of the configuration.
    return {name: target for name, target in parts.items() if name not in TARGETS["module"].reserved}


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
    """Refuse a run that would not end, or not begin."""
    limits = [trainer.get("max_steps", -1), trainer.get("max_epochs", -1), trainer.get("max_time")]
    is_limited = any(limit not in (-1, None) for limit in limits)
    has_budget = strategy.get("target_epsilon") is not None and strategy.get("noise_multiplier") is not None
    if not is_limited and not has_budget:
        raise ConfigurationError(
            "no stopping criterion: set trainer.max_steps or trainer.max_epochs (or strategy.target_epsilon in "
            "addition to the noise)."
        )
