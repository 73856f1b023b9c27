"""Everything that a training step may change before its backward pass, and how it is put back."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dpbench.records.training import Training

_MOST_ENTRIES = 10_000  # of a list or dictionary that are looked into
_HOOKS = ("_hooks", "_with_kwargs", "_always_called")
CODE = (
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)
"""Kinds of objects that say what is done, and hold no values."""
PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)
"""Kinds of values that nothing can change."""
_OPAQUE = (*CODE, Optimizer, Dataset, DataLoader)
_OPAQUE_ROOMS = (
    "torch.",
    "pytorch_lightning.",
    "lightning.",
    "lightning_fabric.",
    "numpy.",
    "dpbench.strategies.",
    "dpbench.callback.",
    "dpbench.session.",
    "dpbench.guards.",
    "dpbench.records.",
)
_COUNTS = (int, bool, str, type(None))  # that hardly anybody derives from records
_PROBES = {"log", "log_dict", "manual_backward", "all_gather"}  # set by the probe itself


Undo = Callable[[], object]


class StepState:
    """Random numbers and all that can be reached from a module: attributes, buffers, metric states, gradients.

    Not reached are iterators, files, slots of objects without a dictionary, and what only the trainer, a data set or a
    closure holds. Parameters are not copied: a step that writes to one is refused anyway.

    Args:
        training: Its module; its flags, schedules and the options of its optimizers are kept too.

    Attributes:
        holders: Dictionaries and keys by which generators of NumPy can be reached.
        sources: Generators of `random`, beside the global one.
    """

    def __init__(self, training: Training) -> None:
        self.holders: list[tuple[dict[Any, Any], Any]] = []
        self.sources: list[random.Random] = []
        self._undo: list[Undo] = []
        self._undo_draws: list[Undo] = []
        self._is_same: list[Callable[[], bool]] = []
        self._generator_states: list[Callable[[], Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._dictionaries: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # with their entries as they were
        self._contents: dict[int, Any] = {}  # of tensors, arrays and lists as they were, by id
        self._alive: list[object] = []  # so that no number names two objects
        self._keep_global_generators(training.device)
        should_stop = training.should_stop
        self._undo.append(lambda: setattr(training, "should_stop", should_stop))
        self._keep_reachable(training)
        for parameter, _ in self._gradients:
            parameter.grad = None  # a step that zeroes them in place must not reach them

    def restore(self) -> None:
        """Put everything back but gradients, which are cleared."""
        for undo in self._undo:
            undo()
        self.rewind()

    def rewind(self) -> None:
        """Put random numbers back and clear gradients; whatever else a step has left behind stays."""
        for undo in self._undo_draws:
            undo()
        for parameter, _ in self._gradients:
            parameter.grad = None

    def changed(self) -> bool:
        """Whether a step has left anything behind but random numbers, gradients, and counts (whole numbers, flags)."""
        return not all(is_same() for is_same in self._is_same)

    def spread(self) -> bool:
        """Fill memories that a step has written to with what it wrote: each entry that is as it was gets such a value.

        A queue of features or a replay buffer is read sparsely. One lot writes few of its entries, so that the next one
        would hardly ever show that it reads them. What was written stays where it is: an entry that only the record
        reads that wrote it is none of the others' business.

        Returns:
            Whether there were any. `restore` puts everything back.
        """
        filled = list(self._filled_memories())
        for dictionary, name, value in filled:
            dictionary[name] = value
        return bool(filled)

    def has_memories(self) -> bool:
        """Whether a step has written to a part of something that has further entries."""
        return any(True for _ in self._filled_memories())

    def _filled_memories(self) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
        """Dictionaries, names in them, and what is to take the place of the memory there."""
        for dictionary, before in self._dictionaries:
            for name, value in dictionary.items():
                contents = self._contents.get(id(before.get(name)))
                filled = _filled(value, contents)
                if filled is not None:
                    yield dictionary, name, filled

    def drawn(self, on_device: bool = True) -> bytes:
        """States of all random generators: how much was drawn.

        Args:
            on_device: Whether torch's own generator of the module's device is one of them.
        """
        states = []
        for number, get in enumerate(self._generator_states):
            if number == 0 and not on_device:
                continue
            state = get()
            if isinstance(state, Tensor):
                state = state.cpu().numpy()
            states.append(state)
        return pickle.dumps(states)

    def finish(self) -> None:
        """Put everything back, gradients included."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def _keep_global_generators(self, device: torch.device) -> None:
        if device.type == "cuda":  # first, for `drawn`
            self._keep_generator(
                lambda: torch.cuda.get_rng_state(device),
                lambda state: torch.cuda.set_rng_state(state, device),
            )
        self._keep_generator(torch.get_rng_state, torch.set_rng_state)
        self._keep_generator(np.random.get_state, np.random.set_state)
        self._keep_generator(random.getstate, random.setstate)

    def _keep_generator(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        state = copy.deepcopy(get())
        self._undo_draws.append(lambda: put(state))
        self._generator_states.append(get)

    def _keep_reachable(self, training: Training) -> None:
        """Remember the module, schedules, options of optimizers, and all that they hold, each object once."""
        pending: list[Any] = [training.module]
        pending += [scheduler.__dict__ for scheduler in training.schedulers]
        pending += [optimizer.param_groups for optimizer in training.optimizers]
        seen: set[int] = set()
        while pending:
            x = pending.pop()
            if isinstance(x, PLAIN) or id(x) in seen:
                continue
            seen.add(id(x))
            self._alive.append(x)
            pending += self._keep(x)

    def _keep(self, x: Any) -> Iterable[Any]:
        """Remember one object; what it holds is returned."""
        if isinstance(x, Tensor):
            self._keep_tensor(x)
        elif isinstance(x, np.ndarray):
            self._keep_array(x)
        elif isinstance(x, torch.Generator | np.random.RandomState):
            self._keep_generator(x.get_state, x.set_state)
        elif isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
            self._keep_generator(x.getstate, x.setstate)
            self.sources.append(x)
        elif isinstance(x, np.random.Generator):
            bits = x.bit_generator

            def put(state: Any) -> None:
                bits.state = copy.deepcopy(state)

            self._keep_generator(lambda: bits.state, put)
        elif isinstance(x, dict):
            entries = self._keep_dict(x)
            return entries.values() if len(entries) <= _MOST_ENTRIES else ()
        elif isinstance(x, list | set | deque | tuple):
            return self._keep_container(x)
        elif isinstance(x, nn.Module) or (hasattr(x, "__dict__") and not is_opaque(x)):
            attributes = self._keep_dict(x.__dict__)
            # Not what hooks hold; but a hook that the step registers would be there once for each of its runs.
            for name in attributes:
                if name.endswith(_HOOKS) and isinstance(attributes[name], dict):
                    self._keep_dict(attributes[name])
            return [value for name, value in attributes.items() if not name.endswith(_HOOKS)]
        return ()

    def _remember(self, undo: Undo, is_same: Callable[[], bool]) -> None:
        self._undo.append(undo)
        self._is_same.append(is_same)

    def _keep_tensor(self, x: Tensor) -> None:
        if x.is_leaf:
            requires_grad = x.requires_grad

            def undo() -> None:
                if x.requires_grad != requires_grad:
                    x.requires_grad_(requires_grad)

            self._undo.append(undo)
            self._gradients.append((x, x.grad))
        if isinstance(x, nn.Parameter) or x.is_inference() or x.is_meta:
            return
        data = x.data  # to which no write is counted
        before = x.detach().clone()
        self._contents[id(x)] = before

        def is_same() -> bool:
            return _is_equal(data, before)

        self._remember(lambda: is_same() or data.copy_(before), is_same)

    def _keep_array(self, x: NDArray[Any]) -> None:
        if not x.flags.writeable or x.dtype.hasobject:
            return
        before = x.copy()
        self._contents[id(x)] = before
        has_nan = x.dtype.kind in "fc"
        self._remember(
            lambda: np.copyto(x, before),
            lambda: np.array_equal(x, before, equal_nan=has_nan),
        )

    def _keep_dict(self, x: dict[Any, Any]) -> dict[Any, Any]:
        """Remember a dictionary, and generators of NumPy in it; a copy is returned."""
        before = dict(x)
        self._dictionaries.append((x, before))
        for key, value in x.items():
            if isinstance(value, np.random.Generator | np.random.RandomState):
                self.holders.append((x, key))

        def refill() -> None:
            x.clear()
            x.update(before)

        self._remember(refill, lambda: _are_same_entries(x, before))
        return before

    def _keep_container(self, x: Any) -> Iterable[Any]:
        """Remember what a list, set, queue or tuple holds; what can hold more itself is returned."""
        if isinstance(x, set):
            members = set(x)
            self._undo += [x.clear, lambda: x.update(members)]
            self._is_same.append(lambda: x == members)
            return ()
        entries = list(x)
        self._contents[id(x)] = entries

        def is_same() -> bool:
            return len(x) == len(entries) and all(map(_is_same_value, x, entries))

        self._is_same.append(is_same)
        if isinstance(x, list):
            self._undo.append(lambda: x.__setitem__(slice(None), entries))
        elif isinstance(x, deque):
            self._undo += [x.clear, lambda: x.extend(entries)]
        return entries if len(entries) <= _MOST_ENTRIES else ()


def _is_equal(x: Tensor, other: Tensor) -> bool:
    if x.layout == torch.strided:
        return torch.equal(x, other)
    # torch compares no sparse tensors, such as the adjacency of a graph.
    x = x.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    other = other.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    is_same_shape = x.shape == other.shape and x.values().shape == other.values().shape
    return is_same_shape and torch.equal(x.indices(), other.indices()) and torch.equal(x.values(), other.values())


def _filled(value: Any, before: Any) -> Any:
    """A memory whose unchanged entries were given changed ones' values; None where there are not both kinds of them.

    Args:
        value: Tensor, array, list or queue as a step has left it.
        before: What it held before, in a copy.
    """
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return _filled_rows(value.detach(), before)
    if isinstance(value, np.ndarray) and isinstance(before, np.ndarray):
        # What torch has no type for (long doubles, foreign byte order) is left alone.
        if value.dtype != before.dtype or value.dtype.kind not in "fiub" or value.dtype.itemsize > 8:
            return None
        if not value.dtype.isnative:
            return None
        rows = _filled_rows(torch.from_numpy(value.copy()), torch.from_numpy(before))
        return None if rows is None else rows.numpy()
    if isinstance(value, list | deque) and isinstance(before, list):
        old = set(map(id, before))
        written = [entry for entry in value if id(entry) not in old]
        if not 0 < len(written) < len(value):
            return None
        repeated = itertools.cycle(written)
        entries = [next(repeated) if id(entry) in old else entry for entry in value]
        return deque(entries, value.maxlen) if isinstance(value, deque) else entries
    return None


def _filled_rows(rows: Tensor, before: Tensor) -> Tensor | None:
    if rows.is_nested or rows.is_quantized or rows.layout != torch.strided:
        return None
    if rows.shape != before.shape or rows.device != before.device or not rows.dim():
        return None
    is_same = (rows == before) | (rows.isnan() & before.isnan())
    is_written = ~is_same.flatten(1).all(1) if rows.dim() > 1 else ~is_same
    written = rows[is_written]
    count = len(rows) - len(written)
    if not len(written) or not count:
        return None
    filled = rows.clone()
    repeated = torch.arange(count, device=rows.device) % len(written)
    filled[~is_written] = written[repeated]
    return filled


def _are_same_entries(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    for name, value in before.items():
        if name not in now or not _is_same_value(now[name], value):
            return False
    added = now.keys() - before.keys()
    return added <= _PROBES


def _is_same_value(now: object, before: object) -> bool:
    """Whether a value is the object that it was, an equal number, or a count, whatever it counts."""
    if now is before or isinstance(now, _COUNTS):
        return True
    return isinstance(now, float) and now == before


def is_opaque(x: object) -> bool:
    """Whether an object is not looked into: it is code, or that of a library."""
    room = type(x).__module__
    return isinstance(x, _OPAQUE) or f"{room}.".startswith(_OPAQUE_ROOMS)
