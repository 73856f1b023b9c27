"""A composed configuration, checked as a whole before anything is made of it or written."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import pytorch_lightning as pl
from hydra.utils import get_class
from pydantic import AfterValidator, Field
from pytorch_lightning.loggers.logger import Logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpbench.errors import ConfigurationError, brief
from dpbench.privacy.canaries.canaries import GradientCanaries
from dpbench.records.source import RecordSource
from dpbench.run.checkpoint import seconds_of
from dpbench.run.objective import objective_of
from dpbench.run.options import check_options, check_values, described, fits, nearest, options_of, shown
from dpbench.run.processes import check_processes
from dpbench.run.saved_config import SCHEMA
from dpbench.run.search_path import choices_with
from dpbench.strategies import NonPrivate, PrivateStrategy

_MARKS = ("_target_", "_partial_")


def _of_a_folder(name: str) -> str:
    if name != name.strip() or name.strip(".") == "" or len(name.encode()) > 150 or re.search(r"[/\\\x00-\x1f]", name):
        raise ValueError
    return name


def _of_wandb(name: str) -> str:
    if not name.strip() or re.search(r"[/\\#?%:\x00-\x1f]", name):
        raise ValueError
    return name


Name = Annotated[str, AfterValidator(_of_a_folder), "a name of at most 150 letters without slashes"]
Positive = Annotated[int, Field(ge=1), "a whole number from 1 on"]
Limit = Annotated[
    int,
    AfterValidator(lambda n: n if n == -1 or n >= 1 else int("")),
    "a positive whole number, or -1 for no limit",
]
Interval = Annotated[
    int | float | str | dict[str, Any] | None,
    AfterValidator(lambda x: x if not isinstance(x, int | float) or x > 0 else int("")),
    "a whole number of lots from 1 on, or a share of an epoch above 0",
]
Some = Annotated[int | float, Field(gt=0), "a number above 0 (trainer.max_steps ends a run)"]
Share = Annotated[int | float, Field(ge=0), "a number from 0 on"]
Rate = Annotated[float, Field(gt=0), "a positive number"]
Factor = Annotated[float, Field(ge=0), "a number from 0 on"]
Seed = Annotated[int, Field(ge=0, lt=2**32), "a whole number from 0 on (below 2^32)"]
Metric = Annotated[str, Field(pattern=r"^[\w-]+(/[\w.-]+)+$"), "the name of a metric, such as val/accuracy"]
Duration = Annotated[str, AfterValidator(seconds_of), "a duration such as 45m, 2h30m, 1d12h or 1-12:00:00"]
Place = Annotated[str, Field(min_length=1), "the folder of a run"]
Parts = Annotated[
    str,
    Field(pattern=r"^(last_layer|bias|lora:[1-9]\d*)(\+(last_layer|bias|lora:[1-9]\d*))*$"),
    "last_layer, bias, lora:8 (or another rank), or several of them joined by +",
]
_OfWandb = Annotated[str, Field(max_length=128), AfterValidator(_of_wandb), "a name without any of / \\ # ? % :"]


@dataclass
class _Run:
    name: Name
    group: Name
    tags: list[Annotated[str, Field(min_length=1, max_length=64), "a word of at most 64 letters"]]
    checkpoint_every_n_steps: Positive
    resume: bool
    schema: Annotated[int, Field(ge=SCHEMA, le=SCHEMA), f"left as it is: {SCHEMA}"]
    max_time: Duration | None = None


@dataclass
class _Engine:
    native: Literal["auto", "on", "off"] = "auto"
    keep_memory: bool = True


@dataclass
class _Logger:
    wandb: bool = False
    mode: Literal["auto", "online", "offline"] = "auto"
    project: _OfWandb = "dpbench"
    entity: _OfWandb | None = None
    notes: str | None = None
    checkpoint: bool = False


_OF_WANDB = {"mode", "project", "entity", "notes", "checkpoint"}


@dataclass
class _Diagnostics:
    every_n_steps: Positive | None
    training_records: Positive | None = None


@dataclass(frozen=True)
class Kind:
    """Kind of class that a group's `_target_` may name.

    Attributes:
        bases: One of these, or a subclass.
        ours: Options that the harness passes.
        narrower: Annotations that say more than those of the class.
        protocol: Which it must follow, where that is no base class.
    """

    bases: tuple[type, ...]
    ours: frozenset[str] = frozenset()
    narrower: Mapping[str, Any] | None = None
    protocol: type | None = None

    @property
    def words(self) -> str:
        """What a class has to be."""
        if self.protocol is not None:
            return f"{self.protocol.__module__}.{self.protocol.__name__}"
        return " or ".join(f"{base.__module__.split('.')[0]}'s {base.__name__}" for base in self.bases)

    def takes(self, cls: Any) -> bool:
        """Whether something is a class of the kind; it is asked before anything is made of the class."""
        methods = [name for name in vars(self.protocol or object) if not name.startswith("_")]
        methods = [name for name in methods if callable(getattr(self.protocol, name))]
        return issubclass(cls, self.bases) and all(callable(getattr(cls, name, None)) for name in methods)


OPTIMIZER = Kind((Optimizer,), frozenset({"params"}), {"lr": Rate})
SCHEDULE = Kind((LRScheduler,), frozenset({"optimizer"}), {"gamma": Factor})
CALLBACK = Kind((pl.Callback,))
LOGGER = Kind((Logger,))
_KINDS = {
    "data": Kind((pl.LightningDataModule,), frozenset({"seed"})),
    "model": Kind((nn.Module,)),
    "module": Kind((pl.LightningModule,), frozenset({"model", "optimizer", "monitored", "schedule"})),
    "strategy": Kind(
        (PrivateStrategy, NonPrivate), frozenset({"seed", "ledger", "after", "fingerprint", "records", "audit"})
    ),
    "records": Kind((object,), protocol=RecordSource),
    "audit": Kind((GradientCanaries,)),
    "optimizer": OPTIMIZER,
    "schedule": SCHEDULE,
    "trainer": Kind(
        (pl.Trainer,),
        frozenset({"logger", "callbacks", "default_root_dir", "use_distributed_sampler", "fast_dev_run"}),
        {
            "max_steps": Limit,
            "max_epochs": Limit | None,
            "log_every_n_steps": Positive,
            "check_val_every_n_epoch": Positive | None,
            "val_check_interval": Interval,
            "num_nodes": Positive,
            "limit_train_batches": Some | None,
            "limit_val_batches": Share | None,
            "limit_test_batches": Share | None,
            "num_sanity_val_steps": Annotated[int, Field(ge=-1), "a whole number from 0 on, or -1 for all"] | None,
        },
    ),
}
_PLAIN: dict[str, type] = {"run": _Run, "engine": _Engine, "logger": _Logger, "diagnostics": _Diagnostics}
_SINGLE: dict[str, Any] = {
    "seed": Seed,
    "after": Place | None,
    "trainable": Parts | None,
    "ema_decay": float | None,
    "objective": Metric | None,
}
_PARTS = {"model": "none", "optimizer": "none", "schedule": "constant"}  # of a module, and the choice without
_MOST = 1_000_000  # layers, widths, steps of a generator: beyond, building them would not end
_NEWER = {"records", "audit"}  # groups that older runs have not
_OPTIONAL = {*_PARTS, *_NEWER}  # groups that may name no class
_NEEDED = (*(group for group in _KINDS if group not in _NEWER), "run", "logger", "diagnostics", "seed", "callbacks")
_OF_HYDRA = ("launcher", "experiment")  # may stand in the configuration of a run that is to be resumed


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a configuration that cannot be meant: whatever can be said without making anything of it.

    Args:
        config: Resolved, as plain data.

    Raises:
        ConfigurationError: One line that names the first wrong key, and what it takes.
    """
    check_values(config, "")
    known = [*_KINDS, *_PLAIN, *_SINGLE, "callbacks"]
    for key in config:
        if key not in (*known, *_OF_HYDRA):
            raise ConfigurationError(f"there is no key {key}.{nearest(key, known)} Known: {', '.join(known)}.")
    for key in _NEEDED:
        if key not in config:
            raise ConfigurationError(f"{key} is missing: it cannot be left out of the configuration.")
    for key, hint in _SINGLE.items():
        if key in config and not fits(hint, config[key]):
            raise ConfigurationError(f"{key} must be {described(hint)}, not {shown(config[key])}.")
    _check_plain(config)
    for group, kind in _KINDS.items():
        if group in _NEWER and group not in config:
            continue
        _check_group(group, _mapping(config[group], group), kind)
    for name, options in _mapping(config["callbacks"], "callbacks").items():
        if options is not None:
            _check_callback(f"callbacks.{name}", _mapping(options, f"callbacks.{name}"))
    _check_parts(config)
    _check_end(config["trainer"], config["strategy"])
    check_processes(config["trainer"])
    objective_of(config)


def _check_plain(config: Mapping[str, Any]) -> None:
    loggers = other_loggers(config)
    for name, options in loggers.items():
        _check_group(f"logger.{name}", options, LOGGER)
    for group, cls in _PLAIN.items():
        if group in config:
            options = _mapping(config[group], group)
            if group == "logger" and not options.get("wandb") and (of_wandb := options.keys() & _OF_WANDB):
                raise ConfigurationError(f"logger.{min(of_wandb)} is a setting of wandb: add logger=wandb (or many).")
            options = {key: value for key, value in options.items() if group != "logger" or key not in loggers}
            check_options(cls, options, group)
            _refuse_gaps(cls, options, group)


def other_loggers(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Options of each logger that the configuration adds by its class."""
    groups = _mapping(config["logger"], "logger")
    return {name: own for name, own in groups.items() if isinstance(own, Mapping)}


def class_of(options: Mapping[str, Any], group: str, kind: Kind | None = None) -> type:
    """The class behind `_target_`; nothing else is ever imported by name, and nothing but such a class is called.

    Args:
        options: Of the group.
        group: Its name.
        kind: What the class must be; None: what the group takes.

    Raises:
        ConfigurationError: There is none, it cannot be imported, or is no class of the right kind.
    """
    kind, path = kind or _KINDS[group], options.get("_target_")
    wanted = kind.words
    if not isinstance(path, str) or not path.strip():
        raise ConfigurationError(f"{group}._target_ must name a class ({wanted}, or a subclass), not {shown(path)}.")
    try:
        logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it says in four lines what is said below in one
        cls = get_class(path)
    except Exception as error:  # whatever a user's own file may raise
        module, _, name = path.rpartition(".")
        why = f"{module} has no {name}" if module in sys.modules else brief(error.__cause__ or error)
        raise ConfigurationError(f"{group}._target_={shown(path)} is no class that can be imported: {why}") from error
    if not kind.takes(cls):
        raise ConfigurationError(f"{group}._target_={path} must be {wanted}, or a subclass.")
    return cls


def _mapping(options: Any, group: str) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"{group} is a group of settings ({group}.KEY=VALUE), not {shown(options)}.")
    return options


def _refuse_gaps(cls: type, options: Mapping[str, Any], group: str) -> None:
    try:
        cls(**options)
    except TypeError as error:
        names = re.findall(r"'(\w+)'", str(error))
        raise ConfigurationError(f"{group}.{names[-1]} is missing: it cannot be left out.") from error


def _check_group(group: str, options: Mapping[str, Any], kind: Kind) -> None:
    if group in _OPTIONAL and not options.keys() - {"_partial_", "_target_"} and options.get("_target_", "") is None:
        return  # a module that does without
    cls = class_of(options, group, kind)
    inner = {name: value for name, value in options.items() if name not in _MARKS}
    if strange := [name for name in inner if name.startswith("_")]:
        raise ConfigurationError(f"there is no key {group}.{strange[0]}.")
    if options.get("_partial_", True) is not True:
        raise ConfigurationError(f"{group}._partial_ must be true: its first argument comes later.")
    if group == "strategy":
        secure = inner.pop("secure", False)
        if not isinstance(secure, bool):
            raise ConfigurationError(f"strategy.secure must be true or false, not {shown(secure)}.")
        if issubclass(cls, NonPrivate):  # takes the options of private strategies, and leaves them alone
            return
    if group == "data" and "seed" not in options_of(cls):
        raise ConfigurationError(
            f"data._target_={options['_target_']} takes no seed, and its lots could not be repeated: give it an option "
            "seed, for LotLoader.poisson(dataset, expected_batch_size, seed=seed)."
        )
    for name, later in parts_made_later(cls).items() if group == "module" else ():
        if inner.get(name) is not None:
            _check_group(f"{group}.{name}", _mapping(inner[name], f"{group}.{name}"), later)
        inner.pop(name, None)
    if huge := [name for name, value in inner.items() if group in ("model", "module") and _largest(value) > _MOST]:
        raise ConfigurationError(f"{group}.{huge[0]} must be at most {_MOST:,}, not {shown(inner[huge[0]])}.")
    _refuse_calls(inner, group)
    _refuse_other_choices(group, cls, inner)
    for name, option in options_of(cls).items():
        if is_dataclass(option.annotation) and isinstance(inner.get(name), Mapping):
            check_options(option.annotation, inner.pop(name), f"{group}.{name}")  # type: ignore[arg-type]
    check_options(cls, inner, group, kind.ours, kind.narrower)


def _check_callback(group: str, options: Mapping[str, Any]) -> None:
    _check_group(group, options, CALLBACK)
    if issubclass(class_of(options, group, CALLBACK), _KINDS["strategy"].bases):
        raise ConfigurationError(f"{group} is a strategy, and a run has one: choose it by strategy=NAME.")


def parts_made_later(cls: type) -> dict[str, Kind]:
    """Options that a class calls to make an optimizer or a schedule; a group with a `_target_` stands for each.

    Their annotations say so, such as `Callable[[Iterable[nn.Parameter]], Optimizer]`.
    """
    found = {name: _made_by(option.annotation) for name, option in options_of(cls).items()}
    return {name: kind for name, kind in found.items() if kind is not None and name not in _KINDS["module"].ours}


def _made_by(hint: Any) -> Kind | None:
    for part in (hint, *get_args(hint)):
        made = get_args(part)[-1] if get_origin(part) is Callable and get_args(part) else None
        for kind in (OPTIMIZER, SCHEDULE):
            if isinstance(made, type) and issubclass(made, kind.bases):
                return kind
    return None


def _refuse_other_choices(group: str, cls: type, options: Mapping[str, Any]) -> None:
    """Say of which choice of the group an option is, where it is none of this one."""
    for name in options.keys() - options_of(cls).keys():
        if others := choices_with(group, name):
            raise ConfigurationError(
                f"{group}.{name} is no setting of {cls.__name__}: add {group}={' or '.join(others)}, or take it away "
                f"(~{group}.{name})."
            )


def _check_parts(config: Mapping[str, Any]) -> None:
    """Refuse a model, optimizer or schedule that the module would leave aside, or lack."""
    cls = class_of(config["module"], "module")
    options = options_of(cls)
    for part, without in _PARTS.items():
        chosen = config[part].get("_target_") is not None
        if chosen and part not in options:
            raise ConfigurationError(f"{cls.__name__} takes no {part}: choose {part}={without}.")
        if not chosen and part in options and options[part].default is inspect.Parameter.empty:
            raise ConfigurationError(f"{cls.__name__} needs one: choose another {part} than {part}={without}.")


def _largest(value: Any) -> float:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return max((_largest(one) for one in inner), default=float(value) if isinstance(value, int | float) else 0.0)


def _refuse_calls(value: Any, path: str) -> None:
    """Hydra would call whatever `_target_` names, wherever it stands."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key in _MARKS:
            raise ConfigurationError(f"{path}.{key} stands where nothing is made from a class.")
        _refuse_calls(inner, f"{path}.{key}")


def _check_end(trainer: Mapping[str, Any], strategy: Mapping[str, Any]) -> None:
    if (most := trainer.get("max_time")) is not None:
        try:
            left = pl.callbacks.Timer(most).time_remaining() or 0.0
        except Exception as error:  # whatever a wrong word makes of it
            raise ConfigurationError(f"trainer.max_time={shown(most)} is no duration: {brief(error)}") from error
        if left <= 0:
            raise ConfigurationError(f"trainer.max_time={shown(most)} leaves no time to train: give a positive one.")
    for kind in ("steps", "epochs"):
        least, limit = trainer.get(f"min_{kind}") or 0, trainer.get(f"max_{kind}") or -1
        if -1 < limit < least:
            raise ConfigurationError(f"trainer.min_{kind}={least} is more than trainer.max_{kind}={limit}.")
    endless = trainer.get("max_steps", -1) == -1 and trainer.get("max_epochs", -1) == -1 and not trainer.get("max_time")
    budget = strategy.get("target_epsilon") is not None and strategy.get("noise_multiplier") is not None
    if endless and not budget:
        raise ConfigurationError(
            "nothing ends this run: set trainer.max_steps or trainer.max_epochs (or strategy.target_epsilon beside the "
            "noise)."
        )
