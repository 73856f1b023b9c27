"""Public numbers of a step: those that are the same for each record, or drawn for each, are exchangeable among them.

Numbers that differ by the place of a record in its batch would have records treated by their places.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpbench.privacy.record_axis.operators import Call, is_among
from dpbench.privacy.record_axis.tags import (
    Axis,
    Exchangeable,
    Joint,
    Local,
    Mixed,
    Over,
    Rows,
    Tag,
    Unwritten,
    arrangement,
    calling_line,
    covers_storage,
    is_private,
    overlaps_itself,
    rows_of,
    set_tag,
    tag_of,
    whole,
)


def make(call: Call) -> bool:
    """Tag the results of a factory, or of writing to memory without records; False for other operators."""
    operator = call.operator
    kind = operator.makes
    if operator.written:
        old, *others = call.tags or [None]
        if old is None or is_private(old) or any(isinstance(tag, Joint) or is_private(tag) for tag in others):
            return False
        if kind == "drawn" and others:
            return False  # drawn by numbers that may be by place
        if old.batch != call.batch or not covers_storage(call.tensors[0]):
            return isinstance(old, Local) and old.batch == call.batch
    elif call.tensors and not operator.is_like:
        return False
    if not isinstance(call.output, Tensor):
        return False
    is_unwritten = kind == "empty" and call.output.numel()
    set_tag(call.output, Unwritten(call.batch) if is_unwritten else Exchangeable(call.batch, kind == "drawn"))
    return True


def make_local(call: Call) -> None:
    """Tag the results on public numbers, none of which are known to be exchangeable."""
    is_spread = call.operator.name == "repeat" or any(_is_expanded(t, call.records) for t in call.tensors)
    if is_spread and not call.operator.written:
        make_public(call)
        return
    for t in call.outputs:
        if tag_of(t) is None and not is_among(t, call.tensors):
            set_tag(t, Local(call.batch))


def _is_expanded(t: Tensor, records: int) -> bool:
    """True if a public tensor is repeated along a dimension that may run over the records."""
    strides = t.stride()
    if 0 not in strides:
        return False
    return any(stride == 0 and size > 1 and size % records == 0 for size, stride in zip(t.shape, strides, strict=True))


def make_public(call: Call) -> None:
    """Tag the results on public memory of which some is exchangeable along the records."""
    operator = call.operator
    is_random = operator.draws or any(getattr(tag, "is_random", False) for tag in call.tags)
    outcome, records = _outcome(call, is_random)
    for place, t in enumerate(call.outputs):
        one = outcome
        if type(outcome) is list:
            one = outcome[place] if place < len(outcome) else None
        if not call.shares(t):
            set_tag(t, _tag_for(call, t, one, records, is_random))
        elif operator.written:
            _overwrite(call, t, one, records, is_random)
    for target in call.written:
        for t in target if isinstance(target, (list, tuple)) else [target]:
            if isinstance(t, Tensor) and not is_among(t, call.outputs):
                _overwrite(call, t, None, records, is_random)


def _outcome(call: Call, is_random: bool) -> tuple[Any, int]:
    """Kind of the outputs of an operator, and the number of records over which they are exchangeable."""
    operator = call.operator
    is_pointwise = operator.rule is not None and operator.rule.__name__ in ("pointwise", "copy")
    if is_pointwise and all(_is_uniform(call, t, tag) for t, tag in call.tagged):
        return _of_draws(call, is_random), call.records
    if operator.name == "repeat" and not isinstance(call.tags[0], Rows):
        return _repeated(call)
    return _exchangeable_outcome(call)


def _is_uniform(call: Call, t: Tensor, tag: Any) -> bool:
    """True for numbers of one kind at all places."""
    if isinstance(tag, (Exchangeable, Unwritten)) and tag.batch == call.batch:
        return True
    return t.numel() == 1 and not isinstance(tag, (Rows, Joint))


def _of_draws(call: Call, is_random: bool) -> Exchangeable | Joint:
    """Tag of elementwise results on draws and constants: joint if one draw is used at several places."""
    drawn = [(t, tag) for t, tag in call.tagged if getattr(tag, "is_random", False)]
    parts = [is_one_place(t, tag, call.records) for t, tag in drawn]
    if (any(parts) and not all(parts)) or any(overlaps_itself(t) for t, _ in drawn):
        return Joint(call.batch)
    for t, _ in drawn[1:]:
        first = drawn[0][0]
        if t.untyped_storage() is first.untyped_storage() and _layout_of(t) != _layout_of(first):
            return Joint(call.batch)
    return Exchangeable(call.batch, is_random, any(parts))


def _layout_of(t: Tensor) -> tuple[Any, ...]:
    """Place of a tensor in its memory."""
    return t.storage_offset(), t.shape, t.stride(), t.dtype


def is_one_place(t: Tensor, tag: Any, records: int) -> bool:
    """True for a part of draws that may be those of one record.

    Args:
        t: A public tensor.
        tag: Its tag.
        records: R.
    """
    if is_private(tag) or not getattr(tag, "is_random", False) or not t.numel():
        return False
    if getattr(tag, "is_part", False):
        return True
    if covers_storage(t) or t.untyped_storage().nbytes() < records * t.element_size():
        return False
    return not any(size % records == 0 and stride for size, stride in zip(t.shape, t.stride(), strict=True))


def _tag_for(call: Call, t: Tensor, outcome: Any, records: int, is_random: bool) -> Tag:
    """The tag of new public memory."""
    if isinstance(outcome, (Exchangeable, Joint)):
        return outcome
    if isinstance(outcome, Axis) and t.numel():
        rows = rows_of(t, outcome, call.batch, records)
        if rows is not None:
            return rows._replace(is_private=False, is_random=is_random)
    return Joint(call.batch) if is_random and outcome is not None else Local(call.batch)


def _overwrite(call: Call, t: Tensor, outcome: Any, records: int, is_random: bool) -> None:
    """Tag public memory to which public numbers were written."""
    old = tag_of(t)
    if old is None:
        return
    if covers_storage(t):
        set_tag(t, _tag_for(call, t, outcome, records, is_random))
        return
    if isinstance(old, (Local, Joint, Mixed)):
        return
    by_place: Tag = Joint(call.batch) if is_random else Local(call.batch)
    if is_private(old):
        reason = "numbers that differ by position in the batch are written into records"
        by_place = Mixed(call.batch, calling_line(), "", reason)
    rows = _rows_written(call, t, old, outcome, records, is_random)
    place = None if rows is None else arrangement(t, rows)
    is_alike = isinstance(outcome, Exchangeable) or place == outcome
    if rows is None or not isinstance(place, Axis) or rows.records != records or not is_alike:
        set_tag(t, by_place)
        return
    is_random = not rows.is_private and (rows.is_random or is_random)
    set_tag(t, rows._replace(is_random=is_random))


def _rows_written(call: Call, t: Tensor, old: Tag, outcome: Any, records: int, is_random: bool) -> Rows | None:
    """The rows of memory of which a part is written: one constant, draws or nothing yet may be rows of all records."""
    if isinstance(old, Rows) or is_private(old):
        return old if isinstance(old, Rows) else None
    axis = outcome
    if isinstance(outcome, Exchangeable):
        axis = next(iter(_exchangeable_axis(call, t, outcome) or ()), None)
    first = rows_of(t, axis, call.batch, records) if isinstance(axis, Axis) else None
    return None if first is None else whole(first)._replace(is_private=False, is_random=is_random)


def _repeated(call: Call) -> tuple[Any, int]:
    """The dimension along which a public tensor was repeated a multiple of R times."""
    tag = call.tags[0]
    for dim, count in enumerate(call["repeats"]):
        size = call.output.shape[dim]
        if count > 1 and count % call.records == 0 and size:
            return Axis(dim, 1, size // count), count
    if isinstance(tag, Exchangeable):
        return Joint(call.batch) if tag.is_random else Exchangeable(call.batch), call.records
    return None, call.records


def _exchangeable_outcome(call: Call) -> tuple[Any, int]:
    """Ask the rule of an operator where its public output is exchangeable, and over how many records."""
    tags = call.tags
    if call.operator.name == "copy_" and (tags[1] is None or isinstance(tags[1], Local)):
        target, source = call.tensors
        repeated = None
        if source.dim() <= target.dim():
            repeated = _exchangeable_axis(call, source.expand(target.shape), tags[1])
        if repeated is not None:
            return repeated  # the same numbers in each row
    axes: dict[int, Axis] = {}
    records = 0
    is_random = False
    for t, tag in call.tagged:
        axis, count = _exchangeable_axis(call, t, tag) or (None, 0)
        if axis is None or not (records in (0, count) or count == call.records):
            continue
        if count != records:
            axes.clear()
        records = count
        axes[id(t)] = axis
        is_random |= getattr(tag, "is_random", False)
    if any(isinstance(tag, Joint) for tag in tags):
        return Joint(call.batch), call.records
    unknown = Joint(call.batch) if is_random else None
    if not axes or call.operator.rule is None:
        return unknown if axes else None, call.records
    asked = Call(call.operator, (), call.values, call.tensors, call.batch, records)
    asked.output = call.output
    asked.axes = axes
    for t, tag in call.tagged:
        if isinstance(tag, Exchangeable) and tag.batch == call.batch:
            asked.exchangeable[id(t)] = None
    try:
        outcome = call.operator.rule(asked)
    except Exception:  # along the records: numbers by place, or of all draws together
        return unknown, records
    return unknown if isinstance(outcome, Over) else outcome, records


def _exchangeable_axis(call: Call, t: Tensor, tag: Any) -> tuple[Axis, int] | None:
    """The axis along which a public tensor is exchangeable, and over how many."""
    if not t.numel() or (isinstance(tag, (Exchangeable, Rows)) and tag.batch != call.batch):
        return None
    if isinstance(tag, Rows):
        return public_axis(t, tag, call.records)
    candidates = []
    for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if size > 1 and size % call.records == 0 and (isinstance(tag, Exchangeable) or stride == 0):
            candidates.append((size != call.records, dim, size))
    if not candidates:
        return None
    _, dim, size = min(candidates)
    return Axis(dim), size


def public_axis(t: Tensor, rows: Rows, records: int) -> tuple[Axis, int] | None:
    """The axis along which a public tensor with rows is exchangeable, and over how many.

    Blocks of rows that are exchangeable are so, too, where the rows are spread over two dimensions by now.

    Args:
        t: A public tensor.
        rows: Its tag.
        records: R.
    """
    place = arrangement(t, rows)
    if isinstance(place, Axis):
        return place, rows.records
    blocks, rest = divmod(rows.records, records)
    if rest or blocks < 2:
        return None
    place = arrangement(t, rows._replace(run=rows.run * blocks, records=records))
    return (place, records) if isinstance(place, Axis) else None
