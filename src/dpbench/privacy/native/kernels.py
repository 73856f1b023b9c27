"""The kernels of `native.cpp` as functions of tensors; callers ask `suits` first."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpbench.privacy import native


def _at(tensor: Tensor, dtype: torch.dtype = torch.float32) -> ctypes.c_void_p:
    """Address of what a kernel reads or writes, which trusts it."""
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise TypeError(f"a kernel needs {dtype} on the CPU, not {tensor.dtype} on {tensor.device}.")
    return ctypes.c_void_p(tensor.data_ptr())


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that a kernel fills; whatever the default precision and device are (Lightning sets them in a step)."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())


def _kernel(name: str) -> Any:
    library = native.library()
    assert library is not None
    return getattr(library, name)


def suits(*tensors: Tensor) -> bool:
    """Whether the kernels can be had and know this device and precision."""
    return all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors) and native.library() is not None


def insisted() -> bool:
    """Whether the kernels are to be used wherever they can be, without timing."""
    return native.mode() == "on"


def _rows(image: Tensor) -> Tensor:
    """(R, C, H, W) → (R, H, W, C) without gaps; a view where the image is channels-last."""
    return image.permute(0, 2, 3, 1).contiguous()


def _dense(image: Tensor) -> Tensor:
    """(R, C, H, W) without gaps, channels first or last."""
    return image if image.is_contiguous(memory_format=torch.channels_last) else image.contiguous()


class Convolved(NamedTuple):
    """Per-record gradients of a convolution.

    Attributes:
        weights: Shape (records, height, width, inputs, outputs); −1, 0 and +1 as int8 where they were discretized.
        squared_norms: Of each record's weights, shape (records,).
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
    a, g, records = _dense(a), _dense(g), len(starts) - 1
    (_, inputs, *size), (_, outputs, *out_size) = a.shape, g.shape
    shape = (*size, inputs, *out_size, outputs, *layer.kernel_size, *layer.stride, *padding, *layer.dilation)
    first = a.is_contiguous(), g.is_contiguous()
    geometry = (ctypes.c_int64 * 18)(records, *shape, *first, torch.get_num_threads())
    dtype = torch.float32 if threshold is None else torch.int8
    weights = _new(records, *layer.kernel_size, inputs, outputs, dtype=dtype)
    norms, bias = _new(records), _new(records, outputs)
    scalars = ctypes.c_float(factor), ctypes.c_float(-1 if threshold is None else threshold)
    rows = _at(order, torch.int64), _at(starts, torch.int64)
    _kernel("dpbench_convolution")(
        geometry, _at(a), _at(g), *rows, *scalars, _at(weights, dtype), _at(norms), _at(bias)
    )
    return Convolved(weights, norms, bias)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum over records of `weights` (R,) times `rows`, numbers or signs of shape (R, ...)."""
    name = "dpbench_weighted_sum" if rows.dtype == torch.float32 else "dpbench_weighted_signs"
    weights, total = weights.contiguous(), _new(*rows.shape[1:])
    sizes = ctypes.c_int64(len(rows)), ctypes.c_int64(total.numel())
    _kernel(name)(_at(rows, rows.dtype), _at(weights), _at(total), *sizes, _threads())
    return total


def group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row gradients of scale and shift, (R, C) each; x and g (R, C, H, W)."""
    x, g = _rows(x), _rows(g)
    records, height, width, channels = x.shape
    scale, shift = _new(2, records, channels).unbind()
    sizes = (ctypes.c_int64(n) for n in (records, height * width, channels, layer.num_groups))
    _kernel("dpbench_group_norm")(
        _at(x), _at(g), _at(scale), _at(shift), *sizes, ctypes.c_double(layer.eps), _threads()
    )
    return scale, shift


def count_outer(g: Tensor, a: Tensor, threshold: float) -> Tensor:
    """How many coordinates of each g_r a_rᵀ are beyond ±τ, shape (R,), from g (R, out) and a (R, in)."""
    counts = _new(len(g))
    _outer("dpbench_count_outer", g, a, threshold, counts)
    return counts


def sum_outer(g: Tensor, a: Tensor, weights: Tensor, threshold: float) -> Tensor:
    """Sum over records of `weights` (R,) times the signs of what is beyond ±τ in g_r a_rᵀ, shape (out, in)."""
    total = _new(g.shape[1], a.shape[1])
    _outer("dpbench_sum_outer", g, a, threshold, weights, total)
    return total


def _outer(name: str, g: Tensor, a: Tensor, threshold: float, *more: Tensor) -> None:
    tensors = [x.contiguous() for x in (g, a, *more)]
    sizes = (ctypes.c_int64(n) for n in (*g.shape, a.shape[1]))
    _kernel(name)(*map(_at, tensors), *sizes, ctypes.c_float(threshold), _threads())


def float64_sum(x: Tensor) -> float:
    """Sum in float64 of flat numbers without gaps, in the same order for every number of threads."""
    total = torch.empty((), dtype=torch.float64, device="cpu")
    _kernel("dpbench_sum")(_at(x), ctypes.c_int64(x.numel()), _at(total, torch.float64), _threads())
    return total.item()


def add_noise(total: Tensor, start: int, std: float, spacing: float, key: bytes) -> None:
    """Add `std` times the numbers `start`, `start` + 1, ... of a stream of standard normal numbers; round to a grid.

    Args:
        total: Consecutive part of a flat sum, float32 on the CPU; in place.
        start: Its first coordinate's place in the stream.
        std: Standard deviation.
        spacing: Of the grid, a power of two. Numbers are drawn as float32 multiples of it.
        key: 32 bytes of ChaCha20, which yields the stream.
    """
    words = (ctypes.c_uint32 * 8).from_buffer_copy(key)
    sizes = ctypes.c_int64(start), ctypes.c_int64(total.numel())
    scale = ctypes.c_float(std / spacing), ctypes.c_double(spacing)
    _kernel("dpbench_add_noise")(_at(total), *sizes, *scale, words, _threads())
