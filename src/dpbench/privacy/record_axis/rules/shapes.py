"""Operators that join, repeat and pad."""

from __future__ import annotations

from dpbench.privacy.record_axis.operators import Call, Mixes, rule
from dpbench.privacy.record_axis.tags import Axis


@rule("stack")
def stack(call: Call) -> Axis:
    """A new dimension."""
    tensors = call["tensors"]
    axis = call.common_axis(*tensors)
    dim = call["dim"] % (tensors[0].dim() + 1)
    return axis._replace(dim=axis.dim + (axis.dim >= dim))


@rule("cat")
def cat(call: Call) -> Axis:
    """Along another dimension; or along the records, whole batches behind each other."""
    tensors = [t for t in call["tensors"] if t.numel()]
    dim = call["dim"] % tensors[0].dim()
    axes = {axis for t in tensors if (axis := call.axis(t)) is not None}
    if {axis.dim for axis in axes} != {dim}:
        return call.common_axis(*tensors)
    inners = {axis.inner for axis in axes}
    if len(inners) > 1:
        raise Mixes("records are arranged in two ways")
    (inner,) = inners
    rows = call.records * inner
    for t in tensors:
        if call.axis(t) is None:
            if t.shape[dim] % rows:
                raise Mixes("records are joined with rows that belong to no record")
            call.require_exchangeable(t, dim, Axis(dim, 1, inner))
    return Axis(dim, sum(t.shape[dim] for t in tensors) // rows, inner)


@rule("repeat")
def repeat(call: Call) -> Axis:
    """Whole batches behind each other."""
    x, times = call["self"], call["repeats"]
    axis = call.common_axis(x)
    dim = axis.dim + len(times) - x.dim()
    return Axis(dim, axis.outer * times[dim], axis.inner)


@rule("constant_pad_nd")
def pad(call: Call) -> Axis:
    """Pads other dimensions than that of the records."""
    x, widths = call["self"], call["pad"]
    axis = call.common_axis(x)
    place = 2 * (x.dim() - 1 - axis.dim)
    if any(widths[place : place + 2]):
        raise Mixes("records are joined with rows that belong to no record")
    return axis


@rule("slice_backward select_backward")
def placed(call: Call) -> Axis:
    """The gradient of a part: zeros around it."""
    gradient, sizes = call["grad_output"], call["input_sizes"]
    dim = call["dim"] % len(sizes)
    axis = call.common_axis(gradient)
    if call.operator.name == "select_backward":
        return axis._replace(dim=axis.dim + (axis.dim >= dim))
    if axis.dim == dim and gradient.shape[dim] != sizes[dim]:
        raise Mixes("a part of the batch")
    return axis


def trailing(call: Call, dims: int) -> Axis:
    """Works on the last dimensions of each item of the others.

    Args:
        call: The call.
        dims: Number of last dimensions.
    """
    x = call.tensors[0]
    alike = [t for t in call.tensors[1:] if t.dim() == x.dim()]
    call.require_public(*(t for t in call.tensors[1:] if t.dim() != x.dim()))
    axis = call.common_axis(x, *alike)
    if axis.dim >= x.dim() - dims:
        raise Mixes("works over the last dimensions, which have records")
    return axis


@rule(
    "avg_pool1d upsample_nearest1d upsample_linear1d reflection_pad1d replication_pad1d multinomial _sample_dirichlet"
)
def last_dimension(call: Call) -> Axis:
    """Works on the last dimension."""
    return trailing(call, 1)


@rule(
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d",
    "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    "_upsample_nearest_exact2d reflection_pad2d replication_pad2d col2im",
)
def last_two_dimensions(call: Call) -> Axis:
    """Works on the last two dimensions."""
    return trailing(call, 2)


@rule(
    "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d upsample_nearest3d upsample_trilinear3d reflection_pad3d",
    "replication_pad3d pixel_shuffle pixel_unshuffle im2col",
)
def last_three_dimensions(call: Call) -> Axis:
    """Works on the last three dimensions."""
    return trailing(call, 3)


@rule(
    "max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward avg_pool2d_backward upsample_nearest2d_backward",
    "upsample_bilinear2d_backward",
)
def pooling_backward(call: Call) -> Axis:
    """The gradient of pooling, of records in the first dimension."""
    tensors = [t for t in call.tensors if t.dim() > 1]
    axis = call.common_axis(*tensors)
    if axis.dim:
        raise Mixes("records in another dimension than the first")
    return axis
