"""A step with its backward pass, recorded, and the values that it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpbench.records.training import NotRepeatable, Training, replaced_methods


class Call(NamedTuple):
    """A call of `log` or `log_dict`.

    Attributes:
        method: Its name.
        arguments: Its arguments.
        options: Its arguments by name.
    """

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Outcome(NamedTuple):
    """Results of a step other than its sums; each repetition overwrites the tensors.

    Attributes:
        output: Return value of the step.
        calls: Logged values.
        records: See `Mechanism.records_of_lot`.
    """

    output: Any
    calls: list[Call]
    records: tuple[int, int]


class Recording(NamedTuple):
    """A step that can be carried out on other records.

    Attributes:
        inputs: Tensors that records are copied into.
        repeat: Function that makes the sums of the records in `inputs`.
        is_recorded: True if it repeats recorded kernels; False if it runs the step itself.
    """

    inputs: list[Tensor]
    repeat: Callable[[], Outcome]
    is_recorded: bool = True


def without_graph(compute: Callable[[], Outcome], rewind: Callable[[], None]) -> Callable[[], Outcome]:
    """A recording that runs its Python again; its outcome is overwritten, as that of a graph is."""
    recorded_leaves, _ = tree_flatten(compute())

    def repeat() -> Outcome:
        leaves, structure = tree_flatten(compute())
        rewind()  # a graph runs nothing of the source
        overwritten = []
        for recorded, leaf in zip(recorded_leaves, leaves, strict=True):
            # Functions stay those of this repetition: in a graph, what they read is overwritten.
            overwritten.append(recorded.copy_(leaf) if isinstance(recorded, Tensor) else leaf)
        return tree_unflatten(overwritten, structure)  # type: ignore[no-any-return]

    return repeat


@contextmanager
def logging_to(calls: list[Call], training: Training) -> Iterator[None]:
    """Within, values that the module logs go into a list, and none are gathered from other processes."""

    def log(*arguments: Any, **options: Any) -> None:
        calls.append(Call("log", arguments, options))

    def log_dict(*arguments: Any, **options: Any) -> None:
        calls.append(Call("log_dict", arguments, options))

    def all_gather(*arguments: Any, **options: Any) -> None:
        raise NotRepeatable("training_step calls all_gather")

    module = training.module
    stand_ins = {"log": log, "log_dict": log_dict, "all_gather": all_gather}
    present = {name: function for name, function in stand_ins.items() if hasattr(module, name)}
    with replaced_methods(module, **present):
        yield


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Within, a GPU works in a stream of its own: libraries make their plans outside of a recording."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


class Draws:
    """States of torch's generators, of the host and of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Have the same numbers drawn again."""
        torch.set_rng_state(self._host)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)


def follows(loss: Tensor, source: Tensor | None) -> bool:
    """True if a loss was computed from the one that a step returned; drivers divide losses, for one."""
    if source is None or loss is source or not loss.requires_grad:
        return source is not None and loss is source
    (factor,) = torch.autograd.grad(loss.sum(), source, retain_graph=True, allow_unused=True)
    return factor is not None


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """Addresses of the tensors of a module, which of them are trained, modes of its parts, and its own numbers."""
    tensors = [*module.parameters(), *module.buffers()]
    places = [(x.data_ptr(), x.shape, x.stride(), x.requires_grad) for x in tensors]
    modes = [part.training for part in module.modules()]
    own = [(name, value) for name, value in vars(module).items() if isinstance(value, int | float)]
    return (*places, *modes, *own)
