"""Loops over records: tensors of single records, each of which has to come about as the others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpbench.privacy.record_axis.operators import Call, Mixes
from dpbench.privacy.record_axis.public import ZEROS, describe
from dpbench.privacy.record_axis.tags import (
    Axis,
    Exchangeable,
    Lone,
    Over,
    Subtotal,
    Total,
    is_private,
)


def of_parts(
    call: Call,
    parts: Sequence[Lone | Subtotal],
    overwritten: Sequence[Any],
) -> Lone | Subtotal | Total | Axis:
    """The outcome of an operator on tensors of single records.

    Args:
        call: The call.
        parts: Tags of these tensors.
        overwritten: Tensors that the operator writes to without a look.

    Raises:
        Mixes: Records are combined, or treated by their places.
    """
    name = call.operator.plain_name
    if name == "add" and len(parts) == 1 and _adds_zero(call):
        return parts[0]
    first = parts[0]
    if isinstance(first, Lone) and all(isinstance(part, Lone) and part.record == first.record for part in parts):
        histories = tuple(part.history for part in parts)
        described = describe(call, overwritten)
        return Lone(call.batch, first.record, hash((call.operator.name, histories, described)))
    if name in ("cat", "stack"):
        return _joined(call, parts)
    if name == "add" and len(parts) == 2 and call["alpha"] == 1:
        return _added(call, *parts)
    raise Mixes("records are combined")


def _added(call: Call, one: Lone | Subtotal, other: Lone | Subtotal) -> Total | Subtotal:
    """A sum of terms of records, each of which counts once and came about as the others."""
    masks = [part.mask if isinstance(part, Subtotal) else 1 << part.record for part in (one, other)]
    if masks[0] & masks[1]:
        raise Mixes("a record is added twice")
    if one.history != other.history:
        raise Mixes("records are treated by their places")
    mask = masks[0] | masks[1]
    if mask == (1 << call.records) - 1:
        return Total(call.batch, Over.SUM)
    return Subtotal(call.batch, mask, one.history)


def _joined(call: Call, parts: Sequence[Lone | Subtotal]) -> Axis:
    """Tensors of single records, in their order, become rows."""
    tensors = call["tensors"]
    is_stack = call.operator.plain_name == "stack"
    order = [part.record if isinstance(part, Lone) else -1 for part in parts]
    if len(tensors) != call.records or order != list(range(call.records)):
        raise Mixes("some records, or records in another order, are joined")
    if len({part.history for part in parts}) > 1:
        raise Mixes("records are treated by their places")
    dim = call["dim"] % (tensors[0].dim() + is_stack)
    sizes = {1} if is_stack else {t.shape[dim] for t in tensors}
    if len(sizes) > 1:
        raise Mixes("records of several lengths are joined")
    return Axis(dim, 1, sizes.pop())


def _adds_zero(call: Call) -> bool:
    """True if a tensor of records is added to nothing, as Python's `sum` does with the first."""
    if any(not isinstance(x, Tensor) and x != 0 for x in (call["self"], call["other"])):
        return False
    for t, tag in call.tagged:
        if not is_private(tag):
            if not isinstance(tag, Exchangeable) or tag.history != ZEROS:
                return False
        elif t.shape != call.output.shape or t.dtype != call.output.dtype:
            return False
    return True
