"""All that is saved with a module, or steers its updates, as it was at one time.

Parameters, buffers, states of metrics and extra states are in every checkpoint, as are hyperparameters
(`self.hparams`); states, options and attributes of optimizers decide how the weights move. A step that sees records may
write to none of them; schedules may move options.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dpbench.canonical import digest_of
from dpbench.records.step_state import CODE, PLAIN
from dpbench.records.training import Training

_PLAIN = (*PLAIN, np.generic)
_FAST = {str, int, float, bool, type(None)}  # most values
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes
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


class Saved:
    """Tensors and values of a training, by name, as they were at one time.

    Tensors count the writes in place (`_version`), which costs microseconds; a write through `.data` is not counted,
    and shows in sums over the contents only.

    Args:
        training: Its module, data module, optimizers and schedules.
        contents: Whether to compare contents, too; costs a pass over all tensors.
    """

    def __init__(self, training: Training, contents: bool = False) -> None:
        self._training = training
        self._contents = contents
        self._alive: list[Any] = []  # so that no number names two objects
        self._state = self._read_state()
        self._options = self._read_options()

    def written(self) -> list[str]:
        """Names of what was written to, replaced, added or removed since then by anybody but a schedule."""
        options = self._read_options()
        written = _differences(self._state, self._read_state())
        changed = _differences(self._options, options)
        # A schedule that has counted a step may have moved options.
        has_moved = any(_is_of_schedule(name) and type(options.get(name, _MISSING)[0]) is int for name in changed)
        for name in changed:
            if not has_moved or not (_is_of_schedule(name) or self._follows_schedule(name, options)):
                written.append(name)
        return written

    def accept_options(self) -> None:
        """Accept what was written up to now but to tensors of the module and of its optimizers."""
        self._options = self._read_options()

    def _read_state(self) -> Values:
        """The module's tensors and extra states, and the tensors of optimizers' states."""
        values: Values = {}
        tensors: dict[str, Tensor] = {}
        pending: list[tuple[str, nn.Module]] = [("", self._training.module)]
        while pending:  # six times in every lot
            path, module = pending.pop()
            for name, x in (*module._parameters.items(), *module._buffers.items()):
                if x is not None:
                    tensors[path + name] = x
            if "_persistent" in module.__dict__:
                tensors |= _metric_states(module, path)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                values[f"{path}get_extra_state()"] = (pickle.dumps(module.get_extra_state()),)
            for name, child in module._modules.items():
                if child is not None:
                    pending.append((f"{path}{name}.", child))
        if self._contents:
            values |= _added_entries(self._training.module, tensors, self._training.datamodule)
        for name, optimizer in self._named_optimizers():
            for place, state in enumerate(optimizer.state.values()):
                path = f"{name}.state[{place}]."
                for key, x in state.items() if isinstance(state, dict) else ():
                    if isinstance(x, Tensor):
                        tensors[f"{path}{key}"] = x
        marks = self._marks(list(tensors.values()))
        return dict(zip(tensors, marks, strict=True)) | values

    def _read_options(self) -> Values:
        """Hyperparameters, schedules, and all of the optimizers but the tensors of their states."""
        training = self._training
        values: Values = {}
        owners = {"hparams": training.module, "datamodule.hparams": training.datamodule}
        for name, owner in owners.items():
            hparams = getattr(owner, "__dict__", {}).get("_hparams")
            if hparams:
                values |= self._values(hparams, name)
        for name, optimizer in self._named_optimizers():
            for place, state in enumerate(optimizer.state.values()):
                entries = state if isinstance(state, dict) else {"": state}
                others = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
                if others:
                    values |= self._values(others, f"{name}.state[{place}]")
            values |= self._values(_without(vars(optimizer), _OF_TORCH), name)
            for place, group in enumerate(optimizer.param_groups):
                options = {key: value for key, value in _without(group, _PARAMETERS).items() if type(value) is not bool}
                values |= self._values(options, f"{name}.param_groups[{place}]")
        for number, scheduler in enumerate(training.schedulers):
            values |= self._values(scheduler, f"schedule {number}")
        return values

    def _named_optimizers(self) -> list[tuple[str, Optimizer]]:
        optimizers = self._training.optimizers
        if len(optimizers) == 1:
            return [("optimizer", optimizers[0])]
        return [(f"optimizer {number}", optimizer) for number, optimizer in enumerate(optimizers)]

    def _marks(self, tensors: list[Tensor]) -> Iterable[Value]:
        """Number, version, and sum over the contents of each tensor; None where contents are not compared."""
        self._alive += tensors
        try:
            versions = [x._version for x in tensors]
        except RuntimeError:  # made in inference mode: not counted
            versions = [-1 if x.is_inference() else x._version for x in tensors]
        sums = [sum_of_bits(x) for x in tensors] if self._contents else [None] * len(tensors)
        return zip(map(id, tensors), versions, sums, strict=True)

    def _values(self, x: Any, name: str) -> Values:
        if isinstance(x, dict) and _FAST.issuperset(map(type, x.values())):
            return {f"{name}.{key}": _plain(value) for key, value in x.items()}
        return dict(islice(self._leaves(x, name, set()), _MOST_VALUES))

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

    def _leaves(self, x: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Value]]:
        """Values of an object and of all that it holds, in a form that compares.

        Args:
            x: The object.
            name: Of it.
            seen: Numbers (`id`) of the containers that were looked into; none is twice.

        Yields:
            Name and value.
        """
        if isinstance(x, _PLAIN):
            yield name, _plain(x)
            return
        self._alive.append(x)
        if isinstance(x, Tensor):
            yield name, next(iter(self._marks([x])))
        elif isinstance(x, np.ndarray):
            yield name, (x.dtype.str, x.shape, x.tobytes())
        elif isinstance(x, CODE):
            yield name, (id(x),)
        elif id(x) not in seen:
            seen.add(id(x))
            parts = _parts(x)
            yield name, (type(x), len(parts))
            for key, value in parts.items():
                yield from self._leaves(value, f"{name}{key}", seen)


def _plain(x: Any) -> Value:
    """A value that equals itself, which NaN does not."""
    if isinstance(x, float) and math.isnan(x):
        return ("nan",)
    return (x,)


def _is_of_schedule(name: str) -> bool:
    return name.startswith("schedule ")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of entries that are others, or in one of two dictionaries only."""
    if before == now:
        return []
    names = {**before, **now}
    return [name for name in names if before.get(name) != now.get(name)]


def _metric_states(metric: nn.Module, path: str) -> dict[str, Tensor]:
    """States of a torchmetrics metric that `state_dict` holds, by name."""
    states = {}
    for name, is_saved in metric.__dict__["_persistent"].items():
        value = getattr(metric, name, None) if is_saved else None
        for place, x in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(x, Tensor):
                states[f"{path}{name}[{place}]" if isinstance(value, list) else path + name] = x
    return states


def _added_entries(module: nn.Module, tensors: Mapping[str, Tensor], datamodule: Any) -> Values:
    """Hashes of what `state_dict` saves beside known tensors and extra states: by an override or a hook."""
    try:
        state = module.state_dict(keep_vars=True)
    except TypeError:  # an override without torch's options
        state = module.state_dict()
    entries = {}
    for name, value in state.items():
        if value is not tensors.get(name) and not name.endswith("_extra_state"):
            entries[f"state_dict()[{name!r}]"] = (digest_of(value),)
    if datamodule is not None:
        entries["the data module's state_dict()"] = (digest_of(datamodule.state_dict()),)
    return entries


def sum_of_bits(x: Tensor) -> int | None:
    """Sum of the contents' bits: exact, and so the same for any number of threads, and NaN equals itself."""
    if is_lazy(x) or x.is_meta:
        return None
    x = x.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.is_floating_point():
        x = _bits(x.resolve_neg())
    return int(x.sum(dtype=torch.int64))


def _bits(x: Tensor) -> Tensor:
    """A floating-point tensor as whole numbers."""
    size = x.element_size()
    if size == 8:  # as two numbers of 4 bytes, or sums would overflow
        return x.contiguous().flatten().view(torch.int32)
    return x.view(_INTEGERS[size])


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
