"""All that is saved with a module, or steers its updates, as it was at one time.

Parameters, buffers, states of metrics and extra states are in every checkpoint, as are hyperparameters
(`self.hparams`); states, options and attributes of optimizers decide how the weights move. A step that sees records may
write to none of them; schedules may move options.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from dpbench.canonical import digest_of
from dpbench.records.step_state import CODE, PLAIN
from dpbench.records.training import Training

_PLAIN = (*PLAIN, np.generic)
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
            persistent = module.__dict__.get("_persistent", {})  # states of a torchmetrics metric
            for name, is_saved in persistent.items():
                if is_saved:
                    values |= self._values(getattr(module, name), path + name)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                values[f"{path}get_extra_state()"] = (pickle.dumps(module.get_extra_state()),)
            for name, child in module._modules.items():
                if child is not None:
                    pending.append((f"{path}{name}.", child))
        if self._contents:
            values |= _added_entries(self._training.module, tensors, self._training.datamodule)
        for name, state in self._states():
            for key, x in state.items():
                if isinstance(x, Tensor):
                    tensors[f"{name}.{key}"] = x
        marks = self._marks(list(tensors.values()))
        return dict(zip(tensors, marks, strict=True)) | values

    def _read_options(self) -> Values:
        """Hyperparameters, schedules, and all of the optimizers but the tensors of their states."""
        training = self._training
        holders: dict[str, Any] = {}
        owners = {"hparams": training.module, "datamodule.hparams": training.datamodule}
        for name, owner in owners.items():
            holders[name] = getattr(owner, "__dict__", {}).get("_hparams") or {}
        for name, state in self._states():
            others = {key: x for key, x in state.items() if not isinstance(x, Tensor)}
            if others:
                holders[name] = others
        for name, optimizer in self._named_optimizers():
            holders[name] = _own_attributes(optimizer)
            for place, group in enumerate(optimizer.param_groups):
                options = {key: x for key, x in group.items() if key != "params" and type(x) is not bool}
                holders[f"{name}.param_groups[{place}]"] = options
        for number, scheduler in enumerate(training.schedulers):
            holders[f"schedule {number}"] = scheduler
        values: Values = {}
        for name, holder in holders.items():
            values |= self._values(holder, name)
        return values

    def _named_optimizers(self) -> list[tuple[str, Optimizer]]:
        optimizers = self._training.optimizers
        if len(optimizers) == 1:
            return [("optimizer", optimizers[0])]
        return [(f"optimizer {number}", optimizer) for number, optimizer in enumerate(optimizers)]

    def _states(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Names and entries of the optimizers' states, one for each parameter."""
        for name, optimizer in self._named_optimizers():
            for place, state in enumerate(optimizer.state.values()):
                yield f"{name}.state[{place}]", state if isinstance(state, dict) else {"": state}

    def _marks(self, tensors: list[Tensor]) -> Iterable[Value]:
        """Number, version, and sum over the contents of each tensor; None where contents are not compared."""
        self._alive += tensors
        versions = [-1 if x.is_inference() else x._version for x in tensors]  # not counted in inference mode
        sums = [_sum_of_bits(x) for x in tensors] if self._contents else [None] * len(tensors)
        return zip(map(id, tensors), versions, sums, strict=True)

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
        return not rates or not isinstance(value, float | int) or value in rates

    def _values(self, x: Any, name: str) -> Values:
        """Values of an object and of all that it holds, in a form that compares.

        Args:
            x: The object.
            name: Its name.
        """
        values: Values = {}
        seen: set[int] = set()
        pending = [(name, x)]
        while pending and len(values) < _MOST_VALUES:
            name, x = pending.pop()
            if isinstance(x, _PLAIN):
                values[name] = (x,)  # in which NaN equals itself
                continue
            self._alive.append(x)
            if isinstance(x, Tensor):
                values |= zip([name], self._marks([x]), strict=True)
            elif isinstance(x, np.ndarray):
                values[name] = (x.dtype.str, x.shape, x.tobytes())
            elif isinstance(x, CODE):
                values[name] = (id(x),)
            elif isinstance(x, Mapping | Set) and not isinstance(x, dict):
                values[name] = (repr(x),)
            elif id(x) not in seen:
                seen.add(id(x))
                parts = _parts(x)
                values[name] = (type(x), len(parts))
                for place, (key, part) in enumerate(parts.items()):
                    pending.append((f"{name}.{key}" if isinstance(key, str) else f"{name}[{place}]", part))
        return values


def _is_of_schedule(name: str) -> bool:
    return name.startswith("schedule ")


def _differences(before: Values, now: Values) -> list[str]:
    """Names of entries that are others, or in one of two dictionaries only."""
    if before == now:
        return []
    names = {**before, **now}
    return [name for name in names if before.get(name) != now.get(name)]


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


def _sum_of_bits(x: Tensor) -> int | None:
    """Sum of the contents' bits: exact, and so the same for any number of threads, and NaN equals itself."""
    if is_lazy(x) or x.is_meta:
        return None
    x = x.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    x = x.resolve_conj().resolve_neg().flatten().contiguous()
    size = min(x.element_size(), 4)  # more as several numbers, or sums would overflow
    return int(x.view(_INTEGERS[size]).sum(dtype=torch.int64))


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}


def _parts(x: Any) -> dict[Any, Any]:
    """What an object holds, by name or place; of large containers the beginning."""
    if isinstance(x, dict):
        return dict(islice(x.items(), _MOST_ENTRIES))
    if isinstance(x, nn.Module):
        x = [*x.parameters(), *x.buffers()]
    if isinstance(x, list | tuple | deque):
        return dict(enumerate(islice(x, _MOST_ENTRIES)))
    if isinstance(x, Optimizer):
        return _own_attributes(x) | {"state": list(x.state.values()), "param_groups": x.param_groups}
    attributes = getattr(x, "__dict__", {})
    return {name: value for name, value in attributes.items() if not isinstance(value, Optimizer | pl.Trainer)}
