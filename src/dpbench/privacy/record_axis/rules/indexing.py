"""Operators that pick and write by an index."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dpbench.privacy.record_axis.operators import Call, Mixes, rule
from dpbench.privacy.record_axis.tags import Axis


@rule("embedding")
def embedding(call: Call) -> Axis:
    """Rows of a table."""
    call.require_public(call["weight"])
    return call.common_axis(call["indices"])


@rule("index_select")
def index_select(call: Call) -> Axis:
    """Rows along one dimension."""
    x, index = call["self"], call["index"]
    dim = call["dim"] % max(x.dim(), 1)
    of_index = call.axis(index)
    if of_index is not None:
        call.require_public(x)
        return of_index._replace(dim=dim)
    axis = call.common_axis(x)
    if axis.dim == dim:
        raise Mixes("picks records by an index")
    return axis


@rule("index_fill index_copy index_add")
def index_write(call: Call) -> Axis:
    """Writes or adds to rows along one dimension, at public places; or adds each record's rows to a row of its own."""
    x, index = call["self"], call["index"]
    dim = call["dim"] % max(x.dim(), 1)
    source = call["source"] if call.has("source") else call["value"]
    call.require_public(index)
    if not (isinstance(source, Tensor) and source.dim()):
        call.require_public(source)
        axis = call.common_axis(x)
    elif call.operator.plain_name == "index_add" and _is_sum_of_rows(call, x, index, call.axis(source), dim):
        return Axis(dim)
    else:
        axis = call.common_axis(x, source)
    if axis.dim == dim:
        raise Mixes("writes to records that an index picks")
    return axis


def _is_sum_of_rows(call: Call, x: Tensor, index: Tensor, axis: Axis | None, dim: int) -> bool:
    """True if the neighboring rows of each record are added to its own row."""
    if axis is None or axis.dim != dim or axis.outer > 1 or x.shape[dim] != call.records:
        return False
    records = torch.arange(call.records, device=index.device).repeat_interleave(axis.inner)
    if not torch.equal(index.long(), records):
        return False
    call.require_along(x, Axis(dim))
    return True


@rule("_embedding_bag _embedding_bag_forward_only")
def embedding_bag(call: Call) -> list[Axis | None]:
    """Sums of rows of a table, by bags of one size."""
    weight, indices, offsets = call["weight"], call["indices"], call["offsets"]
    call.require_public(weight, offsets)
    axis = call.common_axis(indices, call["per_sample_weights"])
    bags = len(offsets)
    if axis.dim or not bags or bags % call.records or indices.numel() % bags:
        raise Mixes("bags over records")
    size = indices.numel() // bags
    if not size or axis.inner % size:
        raise Mixes("bags over records")
    if not torch.equal(offsets, torch.arange(bags, device=offsets.device) * size):
        raise Mixes("bags of several sizes")
    of_bags = Axis(0, axis.outer, axis.inner // size)
    return [of_bags, axis, of_bags, of_bags]


class _Entry(NamedTuple):
    """A tensor among the indices of x[...].

    Attributes:
        dim: The dimension that it indexes; the first one of a mask.
        value: The tensor.
    """

    dim: int
    value: Tensor

    @property
    def is_mask(self) -> bool:
        return self.value.dtype in (torch.bool, torch.uint8)


@rule("index _unsafe_index index_put _unsafe_index_put _index_put_impl")
def index(call: Call) -> Axis:
    """x[...] and x[...] = y with tensors as indices."""
    x = call["self"]
    is_put = "index_put" in call.operator.name
    values = call["values"] if is_put else None
    entries = _entries(call)
    if any(entry.is_mask for entry in entries):
        return _masked(call, x, values, entries)
    return _indexed(call, x, values, entries)


def _entries(call: Call) -> list[_Entry]:
    """The tensors among the indices; masks without records by the places that they name."""
    entries = []
    dim = 0
    for value in call["indices"]:
        if value is None:
            dim += 1
            continue
        entry = _Entry(dim, value)
        if not entry.is_mask:
            entries.append(entry)
            dim += 1
            continue
        if call.has_records(value):
            entries.append(entry)
        else:
            entries += [_Entry(dim + k, places) for k, places in enumerate(value.nonzero().unbind(1))]
        dim += value.dim()
    return entries


def _masked(call: Call, x: Tensor, values: Tensor | None, entries: list[_Entry]) -> Axis:
    """A mask with records: one value may be written where it says."""
    if values is None:
        raise Mixes("rows picked by a mask")
    if len(entries) > 1 or values.numel() != 1 or call.has_records(values) or call["accumulate"]:
        raise Mixes("values written where a mask says")
    entry = entries[0]
    of_mask = call.axis(entry.value)
    assert of_mask is not None
    axis = of_mask._replace(dim=of_mask.dim + entry.dim)
    call.require_along(x, axis)
    return axis


def _indexed(call: Call, x: Tensor, values: Tensor | None, entries: list[_Entry]) -> Axis:
    """Integer indices, broadcast against each other."""
    dims_of_index = max(entry.value.dim() for entry in entries)
    of_index = _axis_of_indices(call, entries, dims_of_index)
    taken = [entry.dim for entry in entries]
    are_neighbors = taken == list(range(taken[0], taken[0] + len(taken)))
    start = taken[0] if are_neighbors else 0  # of the index's dimensions in the output
    of_x = call.axis(x) or _rows_of_places(call, x, entries)
    if of_x is None:
        if of_index is None:
            raise Mixes("records are written to public memory")
        if values is not None:
            raise Mixes("records write to places that they choose")
        _require_no_places(call, entries, of_index, dims_of_index)
        return of_index._replace(dim=start + of_index.dim)
    if of_x.dim in taken:
        picked = _each_at_its_place(call, of_x, entries, of_index, dims_of_index, start)
    else:
        if of_index is not None:
            raise Mixes("records pick from records")
        free_before = sum(dim not in taken for dim in range(of_x.dim))
        is_behind = not are_neighbors or taken[0] < of_x.dim
        picked = of_x._replace(dim=free_before + (dims_of_index if is_behind else 0))
    if values is not None:
        call.require_along(values, picked, x.dim() - len(taken) + dims_of_index)
        return of_x
    return picked


def _require_no_places(call: Call, entries: list[_Entry], axis: Axis, dims_of_index: int) -> None:
    """Refuse an index that differs by the place of a record, even if it counts them: public memory has no records."""
    for entry in entries:
        if call.axis(entry.value) is None:
            call.require_exchangeable(entry.value, axis.dim - dims_of_index + entry.value.dim(), axis)


def _axis_of_indices(call: Call, entries: list[_Entry], dims: int) -> Axis | None:
    """The axis of indices that are broadcast to `dims` dimensions; None if all are public."""
    axes = set()
    for entry in entries:
        axis = call.axis(entry.value)
        if axis is not None:
            axes.add(axis._replace(dim=axis.dim + dims - entry.value.dim()))
    if len(axes) > 1:
        raise Mixes("records are arranged in two ways")
    of_index = next(iter(axes), None)
    if of_index is None:
        return None
    for entry in entries:
        if call.axis(entry.value) is None and not _counts(entry.value, call.records):
            call.require_exchangeable(entry.value, of_index.dim - dims + entry.value.dim(), of_index)
    return of_index


def _counts(index: Tensor, records: int) -> bool:
    """True for an index 0, 1, ... R - 1."""
    if index.numel() != records or index.is_meta:
        return False
    return torch.equal(index.reshape(-1).long(), torch.arange(records, device=index.device))


def _rows_of_places(call: Call, x: Tensor, entries: list[_Entry]) -> Axis | None:
    """The rows of public memory, one for each record and all alike, that arange(R) indexes."""
    for entry in entries:
        has_rows = x.shape[entry.dim] == call.records
        if has_rows and not call.has_records(entry.value) and _counts(entry.value, call.records):
            axis = Axis(entry.dim)
            call.require_exchangeable(x, entry.dim, axis)
            return axis
    return None


def _each_at_its_place(
    call: Call,
    axis: Axis,
    entries: list[_Entry],
    of_index: Axis | None,
    dims_of_index: int,
    start: int,
) -> Axis:
    """x[arange(R), ...]: each record picks of itself."""
    own = next(entry for entry in entries if entry.dim == axis.dim)
    lead = dims_of_index - own.value.dim()
    along = [lead + dim for dim, size in enumerate(own.value.shape) if size == call.records]
    if call.has_records(own.value) or axis[1:] != (1, 1) or not along or not _counts(own.value, call.records):
        raise Mixes("picks records by an index")
    if of_index is not None and of_index != Axis(along[0]):
        raise Mixes("records pick from records")
    for entry in entries:
        if entry is not own and call.axis(entry.value) is None:
            call.require_exchangeable(entry.value, along[0] - dims_of_index + entry.value.dim(), Axis(along[0]))
    return Axis(start + along[0])
