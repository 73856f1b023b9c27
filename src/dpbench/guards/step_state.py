"""Everything that a training step may change before its backward pass, and how it is put back."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dpbench.records.training import Training

_MANY = 10_000  # entries of a list or dictionary that are not looked into
_HOOKS = ("_hooks", "_with_kwargs", "_always_called")
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, Optimizer, Dataset, DataLoader)
_OPAQUE_ROOMS = (
    "torch",
    "pytorch_lightning",
    "lightning",
    "lightning_fabric",
    "numpy",
    "dpbench.strategies",
    "dpbench.callback",
    "dpbench.session",
    "dpbench.guards",
    "dpbench.records",
)
_COUNTS = (int, bool, str, type(None))  # that hardly anybody derives from records
_PROBES = {"log", "log_dict", "manual_backward", "all_gather"}  # set by the probe itself
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class StepState:
    """Random numbers and all that can be reached from a module: attributes, buffers, metric states, gradients.

    Not reached are iterators, files, slots of objects without a dictionary, and what only the trainer, a data set or a
    closure holds. Parameters are not copied: a step that writes to one is refused anyway.

    Args:
        training: Its module; its flags, schedules and the options of its optimizers are kept too.
    """

    def __init__(self, training: Training) -> None:
        self._undo: list[Callable[[], object]] = []
        self._numbers: list[Callable[[], object]] = []  # puts random numbers back
        self._same: list[Callable[[], bool]] = []
        self._states: list[Callable[[], Any]] = []  # of random generators
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._kept: list[object] = []  # so that no number names two objects
        self.holders: list[tuple[dict[Any, Any], Any]] = []
        """Dictionaries and keys by which generators of NumPy can be reached."""
        self.sources: list[random.Random] = []
        """Generators of `random`, beside the global one."""
        self._seen: set[int] = set()
        self._keep_global_generators(training.device)
        stop = training.should_stop
        self._undo.append(lambda: setattr(training, "should_stop", stop))
        schedules = [scheduler.__dict__ for scheduler in training.schedulers]
        options = [optimizer.param_groups for optimizer in training.optimizers]
        found: list[Any] = [training.module, *schedules, *options]
        while found:
            x = found.pop()
            if isinstance(x, _PLAIN) or id(x) in self._seen:
                continue
            self._seen.add(id(x))
            self._kept.append(x)
            found += self._keep(x)
        for parameter, _ in self._gradients:
            parameter.grad = None  # a step that zeroes them in place must not reach them

    def restore(self) -> None:
        """Put everything back but gradients, which are cleared."""
        for undo in self._undo:
            undo()
        self.rewind()

    def rewind(self) -> None:
        """Put random numbers back and clear gradients; whatever else a step has left behind stays."""
        for put in self._numbers:
            put()
        for parameter, _ in self._gradients:
            parameter.grad = None

    def changed(self) -> bool:
        """Whether a step has left anything behind but random numbers, gradients, and counts (whole numbers, flags)."""
        return not all(same() for same in self._same)

    def drawn(self) -> bytes:
        """States of all random generators: how much was drawn."""
        states = [get() for get in self._states]
        return pickle.dumps([x.cpu().numpy() if isinstance(x, Tensor) else x for x in states])

    def finish(self) -> None:
        """Put everything back, gradients included."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _keep_global_generators(self, device: torch.device) -> None:
        self._generator(torch.get_rng_state, torch.set_rng_state)
        if device.type == "cuda":
            self._generator(
                lambda: torch.cuda.get_rng_state(device),
                lambda state: torch.cuda.set_rng_state(state, device),
            )
        self._generator(np.random.get_state, np.random.set_state)
        self._generator(random.getstate, random.setstate)

    def _generator(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        state = copy.deepcopy(get())
        self._numbers.append(lambda: put(state))
        self._states.append(get)

    def _keep(self, x: Any) -> Iterable[Any]:
        """Remember one object; what it holds is returned."""
        if isinstance(x, Tensor):
            self._keep_tensor(x)
        elif isinstance(x, np.ndarray):
            if x.flags.writeable and not x.dtype.hasobject:
                before = x.copy()
                self._undo.append(lambda: np.copyto(x, before))
                self._same.append(lambda: np.array_equal(x, before, equal_nan=x.dtype.kind in "fc"))
        elif isinstance(x, torch.Generator):
            self._generator(x.get_state, x.set_state)
        elif isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
            self._generator(x.getstate, x.setstate)
            self.sources.append(x)
        elif isinstance(x, np.random.RandomState):
            self._generator(x.get_state, x.set_state)
        elif isinstance(x, np.random.Generator):
            bits = x.bit_generator

            def put(state: Any) -> None:
                bits.state = copy.deepcopy(state)

            self._generator(lambda: bits.state, put)
        elif isinstance(x, dict | list | set | deque | tuple):
            return self._keep_container(x)
        elif isinstance(x, nn.Module) or (hasattr(x, "__dict__") and not _opaque(x)):
            attributes = x.__dict__
            saved = dict(attributes)
            self._remember_holders(attributes)
            self._undo.append(lambda: _refill(attributes, saved))
            self._same.append(lambda: _alike(attributes, saved))
            return [value for name, value in saved.items() if not name.endswith(_HOOKS)]
        return ()

    def _keep_tensor(self, x: Tensor) -> None:
        if x.is_leaf:
            requires = x.requires_grad
            self._undo.append(lambda: x.requires_grad == requires or x.requires_grad_(requires))
            self._gradients.append((x, x.grad))
        if isinstance(x, nn.Parameter) or x.is_inference() or x.is_meta:
            return
        data, before = x.data, x.detach().clone()  # `.data`: no write is counted
        self._undo.append(lambda: torch.equal(data, before) or data.copy_(before))
        self._same.append(lambda: torch.equal(data, before))

    def _remember_holders(self, x: dict[Any, Any]) -> None:
        kinds = np.random.Generator | np.random.RandomState
        self.holders += [(x, key) for key, value in x.items() if isinstance(value, kinds)]

    def _keep_container(self, x: Any) -> Iterable[Any]:
        if isinstance(x, dict):
            saved = dict(x)
            self._remember_holders(x)
            self._undo.append(lambda: _refill(x, saved))
            self._same.append(lambda: _alike(x, saved))
            return saved.values() if len(saved) <= _MANY else ()
        if isinstance(x, set):
            members = set(x)
            self._undo += [x.clear, lambda: x.update(members)]
            self._same.append(lambda: x == members)
            return ()
        entries = list(x)
        self._same.append(lambda: len(x) == len(entries) and all(map(_kept, x, entries)))
        if isinstance(x, list):
            self._undo.append(lambda: x.__setitem__(slice(None), entries))
        elif isinstance(x, deque):
            self._undo += [x.clear, lambda: x.extend(entries)]
        return entries if len(entries) <= _MANY else ()


def _refill(x: dict[Any, Any], saved: dict[Any, Any]) -> None:
    x.clear()
    x.update(saved)


def _alike(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return all(name in now and _kept(now[name], x) for name, x in before.items()) and not (
        now.keys() - before.keys() - _PROBES
    )


def _kept(now: object, before: object) -> bool:
    return now is before or isinstance(now, _COUNTS) or (isinstance(now, float) and now == before)


def _opaque(x: object) -> bool:
    room = type(x).__module__
    return isinstance(x, _OPAQUE) or any(room == name or room.startswith(name + ".") for name in _OPAQUE_ROOMS)
