"""The verdict on one batch: are its records separable, and if not, which line mixes them?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpbench.privacy.record_axis.host import watched
from dpbench.privacy.record_axis.mode import IN_BATCH, Event, RecordAxis
from dpbench.privacy.record_axis.tags import (
    UNKNOWN,
    Lone,
    Mixed,
    Over,
    Total,
    Unwritten,
    has_plain_memory,
    is_private,
    tag_of,
)

Kind = Literal["separable", "mixed", "reads", "kept"]

_numbers = itertools.count(1)
_UNSEEN = "memory that unseen code wrote"
_OURS = "dpbench.privacy.gradients."
"""Package of the engine, whose own functions do not mix."""


class Verdict(NamedTuple):
    """What the tags say of a step on one batch.

    Attributes:
        kind: "separable": each record's loss and its rows in each layer are its own. "mixed": records cannot be told
            apart somewhere. "reads": they are separable, but Python got to know values of records, by which it may have
            chosen. "kept": records of an earlier batch are in the loss.
        events: The lines that are the reason, most telling first.
    """

    kind: Kind
    events: tuple[Event, ...] = ()

    @property
    def is_separable(self) -> bool:
        """True if gradients of all records may be computed together."""
        return self.kind == "separable"


def new_axis(records: int) -> RecordAxis:
    """A mode for a batch that no other batch of this process has the number of.

    Args:
        records: Number of records, R.
    """
    return RecordAxis(records, next(_numbers))


class LayerPlaces:
    """Where each layer with parameters of its own had the records of its inputs.

    Args:
        axis: The mode of the step.
        module: The network.

    Attributes:
        module: The network.
        places: Name of a layer → for each call, the places of its tensors, as `RecordAxis.place_of` returns them.
    """

    def __init__(self, axis: RecordAxis, module: nn.Module) -> None:
        self.places: dict[str, list[list[Any]]] = {}
        self.module = module
        self._axis = axis
        self._names = {layer: name for name, layer in module.named_modules()}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within, calls of layers are recorded."""
        before = nn.modules.module.register_module_forward_pre_hook(self._look)
        try:
            yield
        finally:
            before.remove()

    def _look(self, layer: nn.Module, inputs: Any) -> None:
        name = self._names.get(layer)
        if name is None or not any(True for _ in layer.parameters(recurse=False)):
            return
        places = [_place(self._axis, t) for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()]
        self.places.setdefault(name, []).append(places)

    def mixed(self) -> list[Mixed]:
        """Tags of inputs in which records cannot be told apart."""
        found = []
        for calls in self.places.values():
            for places in calls:
                found += [place for place in places if isinstance(place, (Mixed, Total))]
        return [tag if isinstance(tag, Mixed) else _used_total(tag) for tag in found]


def _place(axis: RecordAxis, t: Tensor) -> Any:
    if has_plain_memory(t) and t.numel() and isinstance(tag_of(t), Unwritten):
        return Mixed(axis.batch, UNKNOWN, "", _UNSEEN)
    return axis.place_of(t)


def _used_total(tag: Total) -> Mixed:
    return Mixed(tag.batch, UNKNOWN, "", "a layer is given a sum over records")


def judge(axis: RecordAxis, loss: Any, layers: LayerPlaces | None, over: Over = Over.MEAN) -> Verdict:
    """Judge a step that has run under an axis.

    Args:
        axis: Its mode.
        loss: What it returned: a scalar, or a dictionary with a "loss".
        layers: The places of its layers' inputs; None if the engine looks at them, and at the backward pass.
        over: The loss is declared to be a mean, or a sum, over the records.
    """
    if isinstance(loss, Mapping):
        loss = loss.get("loss")
    mixed = [] if layers is None else layers.mixed()
    if isinstance(loss, (list, tuple)):
        mixed.insert(0, Mixed(axis.batch, UNKNOWN, "", "a step that returns several things"))
    if isinstance(loss, Tensor):
        of_loss = _of_loss(axis, loss, over)
        if of_loss is not None:
            mixed.insert(0, of_loss)
    kept = [tag for tag in mixed if tag.is_kept]
    if kept:
        return Verdict("kept", tuple(_event(tag) for tag in kept))
    if axis.kept:
        return Verdict("kept", tuple(axis.kept))
    of_batch = [event for event in axis.reads if event.reason.startswith(IN_BATCH)]
    if mixed and of_batch:
        return Verdict("reads", tuple(of_batch))
    if mixed:
        return Verdict("mixed", tuple(_event(tag) for tag in mixed))
    has_gradient = isinstance(loss, Tensor) and loss.requires_grad
    if layers is not None and has_gradient and (axis.has_hooks or has_own_nodes(loss)):
        in_gradients = _mixed_in_gradients(axis, loss, layers.module)
        if in_gradients:
            return Verdict("mixed", tuple(in_gradients))
    if axis.reads:
        return Verdict("reads", tuple(axis.reads))
    return Verdict("separable")


def _of_loss(axis: RecordAxis, loss: Tensor, over: Over) -> Mixed | None:
    """The tag of a loss that is not the declared combination of the records' own, as a cause."""
    if not has_plain_memory(loss):
        return Mixed(axis.batch, UNKNOWN, "", "a loss of an unknown kind of tensor")
    tag = tag_of(loss)
    if tag is None and loss.requires_grad:
        return Mixed(axis.batch, UNKNOWN, "", "the loss was computed where nothing is seen")
    if isinstance(tag, Unwritten):
        return Mixed(axis.batch, UNKNOWN, "", _UNSEEN)
    if tag is None or not is_private(tag):
        return None
    if tag.batch != axis.batch:
        return Mixed(tag.batch, UNKNOWN, "", "a loss of an earlier batch", is_kept=True)
    if isinstance(tag, Mixed):
        return tag
    if isinstance(tag, Lone):
        return None
    if isinstance(tag, Total) and tag.over is over:
        return None
    if isinstance(tag, Total):
        return Mixed(
            axis.batch,
            UNKNOWN,
            "",
            f"the loss is a {tag.over.value} over the records, and loss_reduction={over.value!r} is declared",
        )
    return Mixed(axis.batch, UNKNOWN, "", "the loss is no sum or mean over all records")


def _event(tag: Mixed) -> Event:
    return Event(tag.place, tag.operator, tag.reason)


def has_own_nodes(loss: Tensor) -> bool:
    """True if Python functions differentiate something of a loss: they may mix what their forward pass does not."""
    seen = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = getattr(type(node), "_forward_cls", None)  # of a torch.autograd.Function
        if own is not None and not own.__module__.startswith(_OURS):
            return True
        stack += [following for following, _ in node.next_functions]
    return False


def _mixed_in_gradients(axis: RecordAxis, loss: Tensor, module: nn.Module) -> list[Event]:
    """List what mixes records in the gradients of parameters, which are computed once more, under the mode."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        return []
    try:
        with watched(axis), axis.in_backward():
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True, retain_graph=True)
    except Exception as error:  # such as that of a reentrant checkpoint, which has no gradient of some tensors only
        return [Event(UNKNOWN, "grad", f"its gradient cannot be computed once more ({type(error).__name__})")]
    events = []
    for gradient in gradients:
        tag = _place(axis, gradient) if isinstance(gradient, Tensor) else None
        if isinstance(tag, Mixed):
            events.append(_event(tag))
        elif tag is not None and not isinstance(tag, Total) and axis.records > 1:
            events.append(Event(UNKNOWN, "grad", "a gradient that is no sum over all records"))
    return events
