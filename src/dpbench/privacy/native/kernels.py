"""The kernels of `native.cpp` as functions of tensors; callers ask `suits` first."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpbench.privacy import native


def _at(tensor: Tensor, dtype: torch.dtype = torch.float32) -> ctypes.c_void_p:
    """Address of a tensor that a kernel reads or writes; the kernel trusts it."""
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise TypeError(f"a kernel needs {dtype} on the CPU, not {tensor.dtype} on {tensor.device}.")
    return ctypes.c_void_p(tensor.data_ptr())


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel fills, for any default precision and device (Lightning sets them in a step)."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _kernel(name: str) -> Any:
    library = native.library()
    assert library is not None
    return getattr(library, name)


def suits(*tensors: Tensor) -> bool:
    """Return whether there are kernels for this device and precision."""
    for x in tensors:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return False
    return native.library() is not None


def _rows(image: Tensor) -> Tensor:
    """(R, C, H, W) → (R, H, W, C) without gaps; a view where the image is channels-last."""
    return image.permute(0, 2, 3, 1).contiguous()


def _dense(image: Tensor) -> Tensor:
    """(R, C, H, W) without gaps, channels first or last."""
    if image.is_contiguous(memory_format=torch.channels_last):
        return image
    return image.contiguous()


class Convolved(NamedTuple):
    """Per-record gradients of a convolution.

    Attributes:
        weights: Shape (records, height, width, inputs, outputs); −1, 0 and +1 as int8 where they were discretized.
        squared_norms: Squared norm of each record's weights, shape (records,).
        bias: Shape (records, outputs).
    """

    weights: Tensor
    squared_norms: Tensor
    bias: Tensor


def convolution(
    layer: nn.Conv2d,
    a: Tensor,
    g: Tensor,
    padding: tuple[int, int],
    members: tuple[Tensor, Tensor],
    factor: float,
    threshold: float | None,
) -> Convolved:
    """Gradients of records from inputs a (R, in, H, W) and gradients of outputs g (R, out, H', W').

    Args:
        layer: Without channel groups, zero-padded.
        a: Inputs.
        g: Gradients of outputs.
        padding: Zeros on each side, (vertical, horizontal).
        members: Rows of each record as (their order, where each record starts in it).
        factor: Multiplies the sum over a record's rows.
        threshold: τ of the discretization, or None.
    """
    order, starts = members
    a = _dense(a)
    g = _dense(g)
    records = len(starts) - 1
    _, inputs, height, width = a.shape
    _, outputs, out_height, out_width = g.shape
    geometry = (ctypes.c_int64 * 18)(
        records,
        height,
        width,
        inputs,
        out_height,
        out_width,
        outputs,
        *layer.kernel_size,
        *layer.stride,
        *padding,
        *layer.dilation,
        a.is_contiguous(),  # channels first
        g.is_contiguous(),
        torch.get_num_threads(),
    )
    dtype = torch.float32 if threshold is None else torch.int8
    weights = _new(records, *layer.kernel_size, inputs, outputs, dtype=dtype)
    norms = _new(records)
    bias = _new(records, outputs)
    _kernel("dpbench_convolution")(
        geometry,
        _at(a),
        _at(g),
        _at(order, torch.int64),
        _at(starts, torch.int64),
        factor,
        -1 if threshold is None else threshold,
        _at(weights, dtype),
        _at(norms),
        _at(bias),
    )
    return Convolved(weights, norms, bias)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum over records of `weights` (R,) times `rows`, numbers or signs of shape (R, ...)."""
    name = "dpbench_weighted_sum" if rows.dtype == torch.float32 else "dpbench_weighted_signs"
    weights = weights.contiguous()
    total = _new(*rows.shape[1:])
    _kernel(name)(
        _at(rows, rows.dtype),
        _at(weights),
        _at(total),
        len(rows),
        total.numel(),
        torch.get_num_threads(),
    )
    return total


def group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row gradients of scale and shift, (R, C) each; x and g (R, C, H, W)."""
    x = _rows(x)
    g = _rows(g)
    records, height, width, channels = x.shape
    scale, shift = _new(2, records, channels).unbind()
    _kernel("dpbench_group_norm")(
        _at(x),
        _at(g),
        _at(scale),
        _at(shift),
        records,
        height * width,
        channels,
        layer.num_groups,
        layer.eps,
        torch.get_num_threads(),
    )
    return scale, shift


def count_outer(g: Tensor, a: Tensor, threshold: float) -> Tensor:
    """How many coordinates of each g_r a_rᵀ are beyond ±τ, shape (R,), from g (R, out) and a (R, in)."""
    counts = _new(len(g))
    _outer("dpbench_count_outer", g, a, threshold, counts)
    return counts


def sum_outer(g: Tensor, a: Tensor, weights: Tensor, threshold: float) -> Tensor:
    """Sum over records of `weights` (R,) times the signs of entries beyond ±τ in g_r a_rᵀ, shape (out, in)."""
    total = _new(g.shape[1], a.shape[1])
    _outer("dpbench_sum_outer", g, a, threshold, weights, total)
    return total


def _outer(name: str, g: Tensor, a: Tensor, threshold: float, *others: Tensor) -> None:
    # Named, so that the copies outlive the call: a kernel gets only their addresses.
    tensors = [x.contiguous() for x in (g, a, *others)]
    _kernel(name)(
        *map(_at, tensors),
        *g.shape,
        a.shape[1],
        threshold,
        torch.get_num_threads(),
    )


def add_noise(total: Tensor, start: int, std: float, spacing: float, key: bytes) -> None:
    """Add `std` times the numbers `start`, `start` + 1, ... of a stream of standard normal numbers; round to a grid.

    Args:
        total: Consecutive part of a flat sum, float32 on the CPU; in place.
        start: Its first coordinate's place in the stream.
        std: Standard deviation.
        spacing: Spacing of the grid, a power of two. Numbers are drawn as float32 multiples of it.
        key: 32 bytes of ChaCha20, which yields the stream.
    """
    words = (ctypes.c_uint32 * 8).from_buffer_copy(key)
    _kernel("dpbench_add_noise")(
        _at(total),
        start,
        total.numel(),
        std / spacing,
        spacing,
        words,
        torch.get_num_threads(),
    )
