"""The verdict on one batch: are its records separable, and if not, which line mixes them?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor

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
_OURS = "dpbench.privacy.gradients."
"""Package of the engine; its own functions do not mix."""


class Verdict(NamedTuple):
    """Judgment of a step on one batch, by its tags.

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


def judge(axis: RecordAxis, loss: Any, over: Over = Over.MEAN) -> Verdict:
    """Judge the loss of a step that has run under an axis; the engine looks at its layers, and at the backward pass.

    Args:
        axis: Its mode.
        loss: Its result: a scalar, or a dictionary with a "loss".
        over: The loss is declared to be a mean, or a sum, over the records.
    """
    if isinstance(loss, Mapping):
        loss = loss.get("loss")
    cause = _cause(axis, loss, over)
    if cause is not None and cause.is_kept:
        return Verdict("kept", (_event(cause),))
    if axis.kept:
        return Verdict("kept", tuple(axis.kept))
    if cause is not None:
        of_batch = tuple(event for event in axis.reads if event.reason.startswith(IN_BATCH))
        return Verdict("reads", of_batch) if of_batch else Verdict("mixed", (_event(cause),))
    if axis.reads:
        return Verdict("reads", tuple(axis.reads))
    return Verdict("separable")


def _cause(axis: RecordAxis, loss: Any, over: Over) -> Mixed | None:
    """The tag of a loss that is not the declared combination of the records' own, as a cause."""
    if isinstance(loss, (list, tuple)):
        return Mixed(axis.batch, UNKNOWN, "", "a step that returns several things")
    if not isinstance(loss, Tensor):
        return None
    if not has_plain_memory(loss):
        return Mixed(axis.batch, UNKNOWN, "", "a loss of an unknown kind of tensor")
    tag = tag_of(loss)
    if tag is None and loss.requires_grad:
        return Mixed(axis.batch, UNKNOWN, "", "the loss was computed where operations cannot be followed")
    if isinstance(tag, Unwritten):
        return Mixed(axis.batch, UNKNOWN, "", "memory that unseen code wrote")
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
    return Mixed(axis.batch, UNKNOWN, "", "the loss is not a sum or mean over all records")


def _event(tag: Mixed) -> Event:
    return Event(tag.place, tag.operator, tag.reason)


def has_own_nodes(loss: Tensor) -> bool:
    """Return whether Python functions differentiate part of a loss, and so may mix records in the backward pass."""
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
