"""All that is saved with a module, or steers its updates, as it was at one time.

Parameters, buffers, states of metrics and extra states are in every checkpoint, as are hyperparameters
(`self.hparams`); states, options and attributes of optimizers decide how the weights move. A step that sees records may
write to none of them; schedules may move options.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from dpbench.canonical import digest_of
from dpbench.privacy.record_axis.tags import is_of_records
from dpbench.records.step_state import CODE, PLAIN
from dpbench.records.training import Training

_PLAIN = (*PLAIN, np.generic)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their bytes
_MOST_ENTRIES = 1000  # of one container that are looked into
_MOST_OBJECTS = 20_000  # that are looked into, beside plain values
_KIND = object()  # the entry for the class of a container
_DEEPEST = 200  # containers inside of each other
_OF_TORCH = {
    *vars(SGD([torch.zeros(1)])),
    "step",  # wrapped by schedules
    "_opt_called",
    "_step_count",
}
_MISSING = object()
_OF_SCHEDULES = {"lr", "momentum", "betas"}  # options that torch's own schedules move


class Saved:
    """Tensors and values of a training as they were at one time.

    The things to compare are listed anew each time. Tensors count the writes in place (`_version`), which costs
    microseconds; a write through `.data` is not counted, and shows in sums over the contents only.

    Args:
        training: Its module, data module, optimizers and schedules.
        contents: True to compare contents, too, at the cost of a pass over all tensors.
    """

    def __init__(self, training: Training, contents: bool = False) -> None:
        self._training = training
        self._contents = contents
        optimizers = training.optimizers
        names = [f"optimizer {number}" for number in range(len(optimizers))] if len(optimizers) > 1 else ["optimizer"]
        self._optimizers = dict(zip(names, optimizers, strict=False))
        self._alive: list[Any] = []  # so that no number names two objects
        self._seen: set[int] = set()
        self._state = self._read_state()
        self._options = self._read_options()

    def written(self) -> list[str]:
        """Names of all that was written to, replaced, added or removed since then, except by a schedule.

        Among them are tensors that the record axis has seen records being written to, by `.data` or otherwise.
        """
        now = Saved(self._training, self._contents)
        written = [name for name, x in now._tensors.items() if is_of_records(x)]
        if now._state == self._state and now._options == self._options:
            return written
        written += [name for name in _differences(self._state, now._state) if name not in written]
        changed = _differences(self._options, now._options)
        # A schedule that has counted a step may have moved options.
        has_moved = any(_is_of_schedule(name) and type(value) is int for name, value in changed.items())
        for name, value in changed.items():
            if not has_moved or not (_is_of_schedule(name) or self._follows_schedule(name, value)):
                written.append(name)
        return written

    def accept_options(self) -> None:
        """Accept the writes up to now, except those to tensors of the module and of its optimizers."""
        self._options = Saved(self._training, self._contents)._options

    def _read_state(self) -> dict[str, Any]:
        """The module's tensors and extra states, and the tensors of optimizers' states."""
        values: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        modules: list[tuple[str, nn.Module]] = [("", self._training.module)]
        for path, module in modules:
            for name, x in (*module._parameters.items(), *module._buffers.items()):
                if x is not None:
                    tensors[path + name] = x
            modules += [(f"{path}{name}.", child) for name, child in module._modules.items() if child is not None]
            if "_persistent" in module.__dict__ or type(module).get_extra_state is not nn.Module.get_extra_state:
                values |= self._beside_tensors(path, module)
        if self._contents:
            values |= _added_entries(self._training.module, tensors, self._training.datamodule)
        for name, state in self._states():
            for key, x in state.items():
                if isinstance(x, Tensor):
                    tensors[f"{name}.{key}"] = x
        self._tensors = tensors
        self._alive += tensors.values()
        with torch._C.DisableTorchFunction():  # modes of torch need not see this look
            for name, x in tensors.items():
                values[name] = self._mark(x)
        return values

    def _beside_tensors(self, path: str, module: nn.Module) -> dict[str, Any]:
        """Extra states, and states of a torchmetrics metric that are saved with it."""
        persistent = module.__dict__.get("_persistent", {})
        states = {path + name: getattr(module, name) for name, is_saved in persistent.items() if is_saved}
        values: dict[Any, Any] = self._frozen(states) if states else {}
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            values[f"{path}get_extra_state()"] = pickle.dumps(module.get_extra_state())
        return values

    def _read_options(self) -> dict[str, Any]:
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
        for name, optimizer in self._optimizers.items():
            holders[name] = _own_attributes(optimizer)
            for place, group in enumerate(optimizer.param_groups):
                options = {key: x for key, x in group.items() if key != "params"}
                holders[f"{name}.param_groups[{place}]"] = options
        for number, scheduler in enumerate(training.schedulers):
            holders[f"schedule {number}"] = scheduler
        return {name: self._frozen(holder) for name, holder in holders.items()}

    def _states(self) -> Iterator[tuple[str, dict[Any, Any]]]:
        """Names and entries of the optimizers' states, one for each parameter."""
        for name, optimizer in self._optimizers.items():
            for place, state in enumerate(optimizer.state.values()):
                yield f"{name}.state[{place}]", state if isinstance(state, dict) else {"": state}

    def _mark(self, x: Tensor) -> tuple[int, int, int | None]:
        """Number, version, and sum over the contents of a tensor; None where contents are not compared."""
        version = -1 if x.is_inference() else x._version  # not counted in inference mode
        return id(x), version, _sum_of_bits(x) if self._contents else None

    def _follows_schedule(self, name: str, value: Any) -> bool:
        """Return whether schedules move an option, and a learning rate has the value that they state."""
        schedulers = self._training.schedulers
        option = name.partition("].")[2].partition("[")[0]
        if option != "lr":
            modules = {type(scheduler).__module__ for scheduler in schedulers}
            return option in _OF_SCHEDULES or not modules <= {"torch.optim.lr_scheduler"}
        rates: list[float] = []
        for scheduler in schedulers:
            rates += map(float, getattr(scheduler, "_last_lr", ()))
        return not rates or not isinstance(value, float | int) or value in rates

    def _frozen(self, x: Any, depth: int = 0) -> Any:
        """An object and all that it holds, in a form that compares; NaN equals itself.

        Args:
            x: The object.
            depth: How many containers it lies in.
        """
        self._alive.append(x)
        if isinstance(x, Tensor):
            return self._mark(x)
        if isinstance(x, np.ndarray):
            return x.dtype.str, x.shape, x.tobytes()
        if isinstance(x, Mapping | Set) and not isinstance(x, dict):
            return repr(x)
        is_followed = depth < _DEEPEST and len(self._alive) < _MOST_OBJECTS and not isinstance(x, CODE)
        if not is_followed or id(x) in self._seen:
            return id(x)
        self._seen.add(id(x))
        parts = {}
        for name, part in _parts(x).items():
            parts[name] = part if isinstance(part, _PLAIN) else self._frozen(part, depth + 1)
        parts[_KIND] = type(x)  # last, so that places of others are theirs
        return parts


def _is_of_schedule(name: str) -> bool:
    return name.startswith("schedule ")


def _differences(before: Mapping[Any, Any], now: Mapping[Any, Any], name: str = "") -> dict[str, Any]:
    """Entries that differ, or are in one of two dictionaries only: name → present value.

    Args:
        before: One of the dictionaries.
        now: The other one.
        name: Name of their owner.
    """
    differences: dict[str, Any] = {}
    for place, key in enumerate({**before, **now}):
        pair = before.get(key, _MISSING), now.get(key, _MISSING)
        if pair[:1] == pair[1:]:  # the same object, or an equal one
            continue
        path = str(key) if not name else f"{name}.{key}" if isinstance(key, str) else f"{name}[{place}]"
        one, other = [x if isinstance(x, dict) else {} for x in pair]
        differences |= _differences(one, other, path) or {path: pair[1]}
    return differences


def _added_entries(module: nn.Module, tensors: Mapping[str, Tensor], datamodule: Any) -> dict[str, Any]:
    """Hashes of entries that an override or a hook adds to `state_dict`, without known tensors and extra states."""
    try:
        state = module.state_dict(keep_vars=True)
    except TypeError:  # an override without torch's options
        state = module.state_dict()
    entries = {}
    for name, value in state.items():
        if value is not tensors.get(name) and not name.endswith("_extra_state"):
            entries[f"state_dict()[{name!r}]"] = digest_of(value)
    if datamodule is not None:
        entries["the data module's state_dict()"] = digest_of(datamodule.state_dict())
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
    """Parts of an object, by name or place; of large containers the first ones."""
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
