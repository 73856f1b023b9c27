"""What is saved, or steers updates, beside the tensors of a module: hyperparameters, optimizers, schedules.

Hyperparameters (`self.hparams`) are in every checkpoint; states, options and attributes of optimizers decide how the
weights move. A step that sees records may write to none of them; schedules may move options.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpbench.records.step_state import CODE, PLAIN
from dpbench.records.training import Training

_PLAIN = (*PLAIN, np.generic)
_FAST = {str, int, float, bool, type(None)}  # most values, four times in every lot
_MOST_ENTRIES = 1000  # of one container that are looked into
_MOST_VALUES = 20_000  # of an object and everything in it
_OF_TORCH = {
    *vars(SGD([torch.zeros(1)])),
    "step",  # wrapped by schedules
    "_opt_called",
    "_step_count",
}
_OF_SCHEDULES = {"lr", "momentum", "betas"}  # options that torch's own schedules move
_PARAMETERS = {"params"}  # entry of a parameter group
_MISSING = (None,)

Value = tuple[Any, ...]
Values = dict[str, Value]
"""Name of a value → the value, in a form that compares."""


class SavedValues:
    """Values of a training, as they were at one time, by name.

    Args:
        training: Its module, data module, optimizers and schedules.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._alive: list[Any] = []  # so that no number names two objects
        self._fixed = self._fixed_values()
        self._options = self._optimizer_options()
        self._schedules = self._schedule_values()

    def written(self) -> list[str]:
        """Names of values that were written, added or removed since then by anybody but a schedule."""
        options = self._optimizer_options()
        schedules = self._schedule_values()
        fixed = differences(self._fixed, self._fixed_values())
        moved = differences(self._options, options)
        changed = differences(self._schedules, schedules)
        types = {type(schedules.get(name, _MISSING)[0]) for name in changed}
        if int not in types:
            return fixed + moved + changed
        # A schedule has counted a step, so that it may have moved options.
        for name in moved:
            if not self._follows_schedule(name, options):
                fixed.append(name)
        return fixed

    def _fixed_values(self) -> Values:
        """Hyperparameters, and all of the optimizers but their options."""
        training = self._training
        values: Values = {}
        owners = {"hparams": training.module, "datamodule.hparams": training.datamodule}
        for name, owner in owners.items():
            hparams = getattr(owner, "__dict__", {}).get("_hparams")
            if hparams:
                values |= self._values(hparams, name)
        for name, optimizer in self._named_optimizers():
            values |= self._values_of_optimizer(optimizer, name)
        return values

    def _optimizer_options(self) -> Values:
        """Options of parameter groups, without flags."""
        values: Values = {}
        for name, optimizer in self._named_optimizers():
            for place, group in enumerate(optimizer.param_groups):
                options = {}
                for key, value in _without(group, _PARAMETERS).items():
                    if type(value) is not bool:
                        options[key] = value
                values |= self._values(options, f"{name}.param_groups[{place}]")
        return values

    def _schedule_values(self) -> Values:
        values: Values = {}
        for number, scheduler in enumerate(self._training.schedulers):
            values |= self._values(scheduler, f"schedule {number}")
        return values

    def _named_optimizers(self) -> list[tuple[str, Optimizer]]:
        optimizers = self._training.optimizers
        if len(optimizers) == 1:
            return [("optimizer", optimizers[0])]
        named = []
        for number, optimizer in enumerate(optimizers):
            named.append((f"optimizer {number}", optimizer))
        return named

    def _values_of_optimizer(self, optimizer: Optimizer, name: str) -> Values:
        """States that are no tensors (`_module_writes` compares those), and attributes that torch does not set."""
        values: Values = {}
        for place, state in enumerate(optimizer.state.values()):
            state_values = {}
            entries = state if isinstance(state, dict) else {"": state}
            for key, value in entries.items():
                if not isinstance(value, Tensor):
                    state_values[key] = value
            if state_values:
                values |= self._values(state_values, f"{name}.state[{place}]")
        attributes = _without(vars(optimizer), _OF_TORCH)
        if attributes:
            values |= self._values(attributes, name)
        return values

    def _values(self, x: Any, name: str) -> Values:
        if isinstance(x, dict) and _FAST.issuperset(map(type, x.values())):
            return {f"{name}.{key}": _plain(value) for key, value in x.items()}
        leaves = _leaves(x, name, set(), self._alive)
        return dict(islice(leaves, _MOST_VALUES))

    def _follows_schedule(self, name: str, options: Values) -> bool:
        """Whether an option is one that schedules move, and a learning rate what they say that it is."""
        schedulers = self._training.schedulers
        option = name.partition("].")[2].partition("[")[0]
        if option != "lr":
            modules = {type(scheduler).__module__ for scheduler in schedulers}
            return option in _OF_SCHEDULES or not modules <= {"torch.optim.lr_scheduler"}
        rates: list[float] = []
        for scheduler in schedulers:
            rates += map(float, getattr(scheduler, "_last_lr", ()))
        value = options.get(name, _MISSING)[0]
        if not rates or not isinstance(value, float | int):
            return True
        return any(math.isclose(value, rate) for rate in rates)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of entries that are others, or in one of two dictionaries only."""
    if before == now:
        return []
    names = {**before, **now}
    return [name for name in names if before.get(name) != now.get(name)]


def _plain(x: Any) -> Value:
    """A value that equals itself, which NaN does not."""
    if isinstance(x, float) and math.isnan(x):
        return ("nan",)
    return (x,)


def _leaves(
    x: Any,
    name: str,
    seen: set[int],
    alive: list[Any],
) -> Iterator[tuple[str, Value]]:
    """Values of an object and of all that it holds, in a form that compares (a NaN equals itself).

    Args:
        x: The object.
        name: Of it.
        seen: Numbers (`id`) of the containers that were looked into; none is twice.
        alive: Gets each object that is compared by its number.

    Yields:
        Name and value.
    """
    if isinstance(x, _PLAIN):
        yield name, _plain(x)
        return
    alive.append(x)
    if isinstance(x, Tensor):
        version = -1 if x.is_inference() else x._version
        yield name, (id(x), version)
    elif isinstance(x, np.ndarray):
        yield name, (x.dtype.str, x.shape, x.tobytes())
    elif isinstance(x, CODE):
        yield name, (id(x),)
    elif id(x) not in seen:
        seen.add(id(x))
        parts = _parts(x)
        yield name, (type(x), len(parts))
        for key, value in parts.items():
            yield from _leaves(value, f"{name}{key}", seen, alive)


def _parts(x: Any) -> dict[str, Any]:
    """What an object holds, by how it is written; of large containers the beginning."""
    if isinstance(x, nn.Module):
        return _numbered([*x.parameters(), *x.buffers()])
    if isinstance(x, Optimizer):
        parts: dict[str, Any] = {
            ".state": list(x.state.values()),
            ".param_groups": [_without(group, _PARAMETERS) for group in x.param_groups],
        }
        for name, value in _without(vars(x), _OF_TORCH).items():
            parts[f".{name}"] = value
        return parts
    if isinstance(x, Mapping):
        return _entries(x)
    if isinstance(x, list | tuple | deque):
        return _numbered(x)
    if isinstance(x, set | frozenset):
        return _numbered(sorted(map(repr, x)))
    attributes = getattr(x, "__dict__", {})
    if isinstance(x, LRScheduler):
        attributes = _without(attributes, {"optimizer"})
    parts = {}
    for name, value in attributes.items():
        if not isinstance(value, Optimizer | pl.Trainer):
            parts[f".{name}"] = value
    return parts


def _without(values: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _numbered(values: Iterable[Any]) -> dict[str, Any]:
    first = islice(values, _MOST_ENTRIES)
    return {f"[{place}]": value for place, value in enumerate(first)}


def _entries(x: Mapping[Any, Any]) -> dict[str, Any]:
    entries = {}
    first = list(x)[:_MOST_ENTRIES]
    for place, key in enumerate(first):
        name = f".{key}" if isinstance(key, str) else f"[{place}]"
        try:
            entries[name] = x[key]
        except Exception:  # of a configuration: a value that is still missing
            entries[name] = None
    return entries
