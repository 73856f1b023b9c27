"""What a graph of a step's kernels would not do again, because Python did it: looked for before a step is repeated."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from dpbench.guards.host_draws import FreshGenerators
from dpbench.guards.step_state import CODE, PLAIN, StepState, is_opaque
from dpbench.records.training import NotRepeatable, Training, replaced_methods

_MOST_ENTRIES = 10_000  # of a container that are looked into
_SMALL = 1 << 16  # bytes of an array or a tensor of the host, whose contents are compared
_PLAIN_KINDS = frozenset(PLAIN)
_DICTIONARIES = (dict, OrderedDict)
_LIBRARIES = ("torch.", "pytorch_lightning.", "lightning.", "builtins")
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Fingerprint:
    """What a step can read of its module; equal ones are those of equal facts.

    Attributes:
        facts: In the order in which they are found.
        objects: That facts name by number: alive, so that no number comes to name another one.
    """

    facts: tuple[Any, ...]
    objects: list[Any] = field(compare=False, repr=False)


def fingerprint(training: Training) -> Fingerprint:
    """All that a step can read of its module beside the contents of tensors on the device, which a graph reads anew.

    Numbers and words at any depth, which object and memory a name stands for, whether a parameter is trained, contents
    of arrays and tensors on the host. Two lots with equal fingerprints run the same kernels on the same memory.

    Raises:
        NotRepeatable: There is something that only Python can move on.
    """
    seen: set[int] = set()
    facts: list[Any] = []
    objects: list[Any] = []
    pending: list[Any] = [training.module, *training.reachable()]
    while pending:
        x = pending.pop()
        kind = type(x)
        # In each lot of a training: the commonest kinds come first, and most dictionaries of a module are empty.
        if kind in _PLAIN_KINDS or isinstance(x, PLAIN):
            facts.append(kind)
            facts.append(x)
            continue
        if kind in _DICTIONARIES and not x:
            facts.append(kind)
            continue
        facts.append(id(x))
        if id(x) in seen:
            continue
        seen.add(id(x))
        objects.append(x)
        if isinstance(x, Tensor):
            facts += _of_tensor(x, training.device)
        elif isinstance(x, np.ndarray):
            facts += _of_array(x)
        elif isinstance(x, np.generic):
            facts.append(x.item())
        else:
            pending += _parts(x, facts)
    return Fingerprint(tuple(facts), objects)


def _of_tensor(x: Tensor, device: torch.device) -> list[Any]:
    facts: list[Any] = [x.requires_grad, x.shape]
    has_memory = x.layout is torch.strided and not x.is_meta
    if has_memory:
        facts.append(x.data_ptr())
    if x.device == device:
        return facts
    # Python may read it.
    is_small = x.numel() * x.element_size() <= _SMALL
    if has_memory and is_small:
        contents = x.detach().numpy(force=True)
        facts.append(contents.tobytes())
    else:
        facts.append(x._version)
    return facts


def _of_array(x: np.ndarray[Any, Any]) -> list[Any]:
    facts: list[Any] = [x.shape, x.dtype.str, x.ctypes.data]
    if x.nbytes <= _SMALL and not x.dtype.hasobject:
        facts.append(x.tobytes())
    return facts


def _parts(x: Any, facts: list[Any]) -> Iterable[Any]:
    """What an object holds that a step may read."""
    if isinstance(x, dict | list | tuple | deque | set | frozenset):
        facts.append(len(x))
        if len(x) > _MOST_ENTRIES:
            return ()
        return [*x.keys(), *x.values()] if isinstance(x, dict) else x
    if isinstance(x, partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if _is_ours(x):
        return ()
    if isinstance(x, FunctionType):
        return [x.__defaults__, x.__kwdefaults__, *_contents_of_cells(x)]
    if isinstance(x, LRScheduler):
        return [x.last_epoch, getattr(x, "_last_lr", None)]
    if isinstance(x, Optimizer):
        options: list[Any] = []
        for group in x.param_groups:
            options += [value for value in group.values() if isinstance(value, PLAIN)]
        return options
    if isinstance(x, nn.Module):
        facts.append(id(type(x)))
        return [*x.__dict__.values(), *_of_class(type(x))]
    if isinstance(x, Iterator):
        raise NotRepeatable(f"the module holds an iterator ({type(x).__name__}), which only Python moves on")
    if isinstance(x, CODE) or is_opaque(x) or not hasattr(x, "__dict__"):
        return ()
    facts.append(id(type(x)))
    return [*vars(x).values(), *_of_class(type(x))]


def _is_ours(x: Any) -> bool:
    """Whether an object is part of what trains; modules of ours are walked like anybody's."""
    if isinstance(x, nn.Module):
        return False
    rooms = [base.__module__ for base in type(x).__mro__]
    if isinstance(x, FunctionType):
        rooms = [x.__module__]
    return any(str(room).startswith("dpbench.") for room in rooms)


def _contents_of_cells(function: FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # it is empty
            contents.append(None)
    return contents


def _of_class(kind: type) -> list[Any]:
    """Numbers and words that classes of users hold for all of their objects."""
    values = []
    for base in kind.__mro__:
        if base.__module__.startswith(_LIBRARIES):
            continue
        for value in vars(base).values():
            if isinstance(value, int | float | str):
                values.append(value)
    return values


def refuse_python(training: Training, compute: Callable[[], Any]) -> None:
    """Run what is to be repeated, and refuse what a graph would not do again. Everything is put back.

    Args:
        training: Its step is part of it.
        compute: Runs it; returns what it leaves, a tree.

    Raises:
        NotRepeatable: Names it.
    """
    fresh = FreshGenerators()
    with ExitStack() as stack:
        stack.enter_context(training.without_progress())
        stack.enter_context(fresh.repeated(None))
        before = fingerprint(training)
        state = StepState(training)
        drawn = state.drawn(on_device=False)
        try:
            outcome = compute()
            if state.changed() or fingerprint(training) != before:
                raise NotRepeatable(
                    "training_step leaves something behind in the module (a metric's state, a counter, a list)"
                )
            if state.drawn(on_device=False) != drawn or fresh.count:
                raise NotRepeatable("training_step draws random numbers on the host")
        finally:
            state.finish()
    if any(isinstance(leaf, UnreadNumber) for leaf in tree_leaves(outcome)):
        raise NotRepeatable("training_step hands on the number of the batch")


@contextmanager
def without_collectives(training: Training) -> Iterator[None]:
    """Within, a step that waits for other processes gets a NotRepeatable: they do not run it again."""
    if training.world_size == 1:
        yield
        return

    def refused(name: str) -> Callable[..., None]:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise NotRepeatable(f"training_step calls torch.distributed.{name}")

        return refuse

    stand_ins = {}
    for name in _COLLECTIVES:
        if hasattr(dist, name):
            stand_ins[name] = refused(name)
    with replaced_methods(dist, **stand_ins):
        yield


class UnreadNumber:
    """The number of a batch, which a step may be handed and may not read: another lot has another one."""


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise NotRepeatable("training_step uses the number of the batch")

    refuse.__name__ = name
    return refuse


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rand", "ror", "rxor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "hash", "round", "trunc", "floor", "ceil"),
    *("bool", "int", "float", "complex", "index", "str", "repr", "format"),
):
    setattr(UnreadNumber, f"__{_name}__", _refusal(f"__{_name}__"))
