"""What is saved, or steers updates, beside the tensors of a module: hyperparameters, optimizers, schedules.

Hyperparameters (`self.hparams`) are in every checkpoint; states, options and attributes of optimizers decide how the
weights move. A step that sees records may write to none of them; schedules may move options.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpbench.records.training import Training

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, np.generic)
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_FAST = {str, int, float, bool, type(None)}  # most values, four times in every lot
_MANY, _MOST = 1000, 20_000  # entries of one container, and of everything in it, that are looked into
_OF_TORCH = {
    *vars(SGD([torch.zeros(1)])),
    "step",  # wrapped by schedules
    "_opt_called",
    "_step_count",
}
_OF_SCHEDULES = {"lr", "momentum", "betas"}  # options that torch's own schedules move

Value = tuple[Any, ...]


class SavedValues:
    """Values of a training, as they were at one time, by name.

    Args:
        training: Its module, data module, optimizers and schedules.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._alive: list[Any] = []  # so that no number names two objects
        self._fixed, self._options, self._schedules = self._read()

    def written(self) -> list[str]:
        """Names of values that were written, added or removed since then by anybody but a schedule."""
        fixed, options, schedules = self._read()
        names = _differences(self._fixed, fixed)
        moved, changed = _differences(self._options, options), _differences(self._schedules, schedules)
        if any(type(schedules.get(name, (None,))[0]) is int for name in changed):  # a schedule counts its steps
            return [*names, *(name for name in moved if not self._follows_schedule(name, options))]
        return [*names, *moved, *changed]

    def _read(self) -> tuple[dict[str, Value], dict[str, Value], dict[str, Value]]:
        fixed, options, schedules = (dict[str, Value]() for _ in range(3))
        training = self._training
        owners = {"hparams": training.module, "datamodule.hparams": training.datamodule}
        for name, owner in owners.items():
            hparams = getattr(owner, "__dict__", {}).get("_hparams")
            if hparams:
                fixed |= self._values(hparams, name)
        for number, optimizer in enumerate(training.optimizers):
            name = "optimizer" if len(training.optimizers) == 1 else f"optimizer {number}"
            fixed |= self._values_of_optimizer(optimizer, name)
            for place, group in enumerate(optimizer.param_groups):
                own = {key: value for key, value in group.items() if key != "params" and type(value) is not bool}
                options |= self._values(own, f"{name}.param_groups[{place}]")
        for number, scheduler in enumerate(training.schedulers):
            schedules |= self._values(scheduler, f"schedule {number}")
        return fixed, options, schedules

    def _values_of_optimizer(self, optimizer: Optimizer, name: str) -> dict[str, Value]:
        """States that are no tensors (`module_writes` compares those), and attributes of the optimizer's own."""
        values: dict[str, Value] = {}
        for place, state in enumerate(optimizer.state.values()):
            entries = state if isinstance(state, dict) else {"": state}
            others = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
            if others:
                values |= self._values(others, f"{name}.state[{place}]")
        own = {key: value for key, value in vars(optimizer).items() if key not in _OF_TORCH}
        if own:
            values |= self._values(own, name)
        return values

    def _values(self, x: Any, name: str) -> dict[str, Any]:
        if isinstance(x, dict) and _FAST.issuperset(map(type, x.values())):
            return {f"{name}.{key}": _plain(value) for key, value in x.items()}
        return dict(islice(_leaves(x, name, set(), self._alive), _MOST))

    def _follows_schedule(self, name: str, options: Mapping[str, Value]) -> bool:
        """Whether an option is one that schedules move, and a learning rate what they say that it is."""
        schedulers = self._training.schedulers
        option = name.partition("].")[2].partition("[")[0]
        if option == "lr":
            rates = [float(rate) for one in schedulers for rate in getattr(one, "_last_lr", ())]
            value = options.get(name, (None,))[0]
            return not rates or not isinstance(value, float | int) or any(math.isclose(value, rate) for rate in rates)
        return option in _OF_SCHEDULES or not all(
            type(one).__module__ == "torch.optim.lr_scheduler" for one in schedulers
        )


def _differences(before: Mapping[str, Value], now: Mapping[str, Value]) -> list[str]:
    if before == now:
        return []
    return [name for name in {**before, **now} if before.get(name) != now.get(name)]


def _plain(x: Any) -> Value:
    return ("nan",) if isinstance(x, float) and math.isnan(x) else (x,)


def _leaves(x: Any, name: str, seen: set[int], alive: list[Any]) -> Iterator[tuple[str, Value]]:
    """Values of an object and all that it holds, by name, in a form that compares (a NaN equals itself)."""
    if isinstance(x, _PLAIN):
        yield name, _plain(x)
        return
    alive.append(x)
    if isinstance(x, Tensor):
        yield name, (id(x), -1 if x.is_inference() else x._version)
    elif isinstance(x, np.ndarray):
        yield name, (x.dtype.str, x.shape, x.tobytes())
    elif isinstance(x, _OPAQUE):
        yield name, (id(x),)
    elif id(x) in seen:
        return
    else:
        seen.add(id(x))
        parts = _parts(x)
        yield name, (type(x), len(parts))
        for key, value in parts.items():
            yield from _leaves(value, f"{name}{key}", seen, alive)


def _parts(x: Any) -> dict[str, Any]:
    """What an object holds, by how it is written; of large containers the beginning."""
    if isinstance(x, nn.Module):
        tensors = [*x.parameters(), *x.buffers()]
        return {f"[{place}]": value for place, value in enumerate(tensors[:_MANY])}
    if isinstance(x, Optimizer):
        groups = [{key: value for key, value in group.items() if key != "params"} for group in x.param_groups]
        own = {key: value for key, value in vars(x).items() if key not in _OF_TORCH}
        return {".state": list(x.state.values()), ".param_groups": groups, **{f".{key}": v for key, v in own.items()}}
    if isinstance(x, Mapping):
        keys = list(x)[:_MANY]
        names = [f".{key}" if isinstance(key, str) else f"[{place}]" for place, key in enumerate(keys)]
        return {name: _entry(x, key) for name, key in zip(names, keys, strict=True)}
    if isinstance(x, list | tuple | deque):
        return {f"[{place}]": value for place, value in zip(range(_MANY), x, strict=False)}
    if isinstance(x, set | frozenset):
        return {f"[{place}]": value for place, value in enumerate(sorted(map(repr, x))[:_MANY])}
    attributes = getattr(x, "__dict__", {})
    if isinstance(x, LRScheduler):
        attributes = {key: value for key, value in attributes.items() if key != "optimizer"}
    return {f".{key}": value for key, value in attributes.items() if not isinstance(value, Optimizer | pl.Trainer)}


def _entry(x: Mapping[Any, Any], key: Any) -> Any:
    try:
        return x[key]
    except Exception:  # of a configuration: a value that is still missing
        return None
