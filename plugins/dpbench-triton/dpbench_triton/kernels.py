"""The kernels as functions of tensors; callers ask `suits` first.

Each answer is a function of its arguments alone, in one order of sums for every device of a kind: there are no atomic
additions and no timings, so that a resumed run repeats the interrupted one to the bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

_LEAST = 16
"""Smallest side of a tile that Triton multiplies."""
_MOST_OUTPUTS = 64
_MOST_TAPS = 64
_POSITIONS = 32
_SIGNS = 1024
_OUTER_OUTPUTS = 16
_OUTER_INPUTS = 128
_PIXELS = 64
_NOISE_GROUPS = 4
"""Of 256 numbers, that a program draws; no number depends on it."""


class Geometry(NamedTuple):
    """How a 2-d convolution that is padded with zeros goes over an image, (vertical, horizontal).

    Attributes:
        kernel: Height and width.
        stride: Pixels from one position to the next.
        padding: Zeros on each side.
        dilation: Pixels from one tap to the next.
        groups: Number of groups of channels.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


class Convolved(NamedTuple):
    """Per-record gradients of a convolution's weight.

    Attributes:
        weights: Shape (records, outputs, inputs / groups, height, width); float32, or −1, 0 and +1 as int8 where they
            were discretized; None: they were not stored.
        squared_norms: Shape (records,), float32.
    """

    weights: Tensor | None
    squared_norms: Tensor


def convolution(
    geometry: Geometry,
    a: Tensor,
    g: Tensor,
    members: tuple[Tensor, Tensor],
    factor: float = 1.0,
    threshold: float | None = None,
    stored: bool = True,
) -> Convolved:
    """Gradients of records by a convolution's weight: products and sums in float32, never in TF32.

    Squared norms of gradients that are not stored are rounded up where the positions of a record cancel, so that they
    also bound the sums that are then computed otherwise.

    Args:
        geometry: Geometry of the convolution.
        a: Inputs, shape (rows, in, height, width), in any memory format.
        g: Gradients of outputs, shape (rows, out, height', width').
        members: Rows of each record as (their order, where each record starts in it), int64.
        factor: Multiplies the sum over a record's rows.
        threshold: τ ≥ 0 of the discretization, or None.
        stored: True to return the gradients, False for their norms only.
    """
    from dpbench_triton import _convolution

    order, starts = members
    records = len(starts) - 1
    inputs = a.shape[1] // geometry.groups
    outputs = g.shape[1] // geometry.groups
    taps = inputs * geometry.kernel[0] * geometry.kernel[1]
    is_discretized = threshold is not None
    output_block = _block(outputs, _MOST_OUTPUTS)
    tap_block = _block(taps, _MOST_TAPS)
    output_tiles = _tiles(outputs, output_block)
    input_tiles = _tiles(taps, tap_block)
    squares = _new(a, records, geometry.groups * output_tiles * input_tiles)
    weights = None
    if stored:
        dtype = torch.int8 if is_discretized else torch.float32
        weights = _new(a, records, g.shape[1], inputs, *geometry.kernel, dtype=dtype)
    if records:
        grid = (records * output_tiles * input_tiles, geometry.groups)
        with _on(a):
            _convolution.convolution[grid](
                a,
                g,
                order,
                starts,
                squares if weights is None else weights,
                squares,
                factor,
                0.0 if threshold is None else threshold,
                a.shape[2],
                a.shape[3],
                g.shape[3],
                g.shape[2] * g.shape[3],
                inputs,
                outputs,
                output_tiles,
                input_tiles,
                *a.stride(),
                *g.stride(),
                *geometry.kernel,
                *geometry.stride,
                *geometry.padding,
                *geometry.dilation,
                stored,
                is_discretized,
                output_block,
                tap_block,
                _POSITIONS,
            )
    return Convolved(weights, squares.sum(1))


def weighted_signs(signs: Tensor, weights: Tensor) -> Tensor:
    """Sum over records of `weights` (R,) times their signs, int8 of shape (R, ...); float32."""
    from dpbench_triton import _convolution

    signs = signs.contiguous()
    weights = weights.contiguous()
    total = _new(signs, *signs.shape[1:])
    size = total.numel()
    with _on(signs):
        _convolution.weighted_signs[(_tiles(size, _SIGNS),)](
            signs,
            weights,
            total,
            len(signs),
            size,
            _SIGNS,
        )
    return total


def count_outer(g: Tensor, a: Tensor, threshold: float) -> Tensor:
    """How many coordinates of each g_r a_rᵀ are beyond ±τ, shape (R,), from g (R, out) and a (R, in)."""
    from dpbench_triton import _outer

    g = g.contiguous()
    a = a.contiguous()
    records, outputs = g.shape
    inputs = a.shape[1]
    tiles = _tiles(outputs, _OUTER_OUTPUTS)
    counts = _new(a, records, tiles, dtype=torch.int64)
    if records:
        with _on(a):
            _outer.count_outer[(records, tiles)](
                g,
                a,
                counts,
                outputs,
                inputs,
                threshold,
                _OUTER_OUTPUTS,
                _OUTER_INPUTS,
            )
    return counts.sum(1).float()


def sum_outer(g: Tensor, a: Tensor, weights: Tensor, threshold: float) -> Tensor:
    """Sum over records of `weights` (R,) times the signs of what is beyond ±τ in g_r a_rᵀ, shape (out, in), float32."""
    from dpbench_triton import _outer

    g = g.contiguous()
    a = a.contiguous()
    weights = weights.contiguous()
    records, outputs = g.shape
    inputs = a.shape[1]
    total = _new(a, outputs, inputs)
    grid = (_tiles(outputs, _OUTER_OUTPUTS), _tiles(inputs, _OUTER_INPUTS))
    with _on(a):
        _outer.sum_outer[grid](
            g,
            a,
            weights,
            total,
            records,
            outputs,
            inputs,
            threshold,
            _OUTER_OUTPUTS,
            _OUTER_INPUTS,
        )
    return total


def group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row gradients of GroupNorm's scale and shift, float32 of shape (R, C) each.

    Args:
        layer: Layer with the groups and epsilon.
        x: Inputs, shape (R, C, H, W), in any memory format.
        g: Gradients of outputs, likewise.
    """
    from dpbench_triton import _group_norm

    records, channels, height, width = x.shape
    scale = _new(x, records, channels)
    shift = _new(x, records, channels)
    if records:
        members = channels // layer.num_groups
        with _on(x):
            _group_norm.group_norm[(records, layer.num_groups)](
                x,
                g,
                scale,
                shift,
                layer.eps,
                height * width,
                width,
                members,
                *x.stride(),
                *g.stride(),
                _power_of_two(members),
                _PIXELS,
            )
    return scale, shift


def add_noise(
    total: Tensor,
    start: int,
    std: float,
    spacing: float,
    key: bytes,
    divisor: float = 1.0,
) -> None:
    """Add `std` times the numbers `start`, `start` + 1, ... of a stream of standard normal numbers; round to a grid.

    The stream of bits is that of `native.kernels.add_noise`, word for word. The numbers are made of it in float64,
    there in float32, so that on the grid the two differ where a number lies within rounding (some 10^-6 of a spacing)
    of the middle between two of its points.

    Args:
        total: Consecutive part of a flat sum, float32; in place.
        start: Its first coordinate's place in the stream.
        std: Standard deviation.
        spacing: Spacing of the grid, a power of two.
        key: 32 bytes of ChaCha20.
        divisor: Divisor of the noised sum, applied in the same pass.
    """
    from dpbench_triton import _noise

    if total.dtype != torch.float32 or not total.is_contiguous():
        raise TypeError(f"noise needs a float32 sum without gaps, not {total.dtype}.")
    size = total.numel()
    if not size:
        return
    words = torch.frombuffer(bytearray(key), dtype=torch.int32).to(total.device)
    # As a tensor: Triton would hand on numbers of Python in float32.
    scales = torch.tensor([std, spacing, 1 / spacing, divisor], dtype=torch.float64, device="cpu")
    scales[3] = scales[3].float()
    groups = (start + size - 1) // 256 - start // 256 + 1
    with _on(total):
        _noise.add_noise[(_tiles(groups, _NOISE_GROUPS),)](
            total,
            words,
            scales.to(total.device),
            start,
            size,
            _NOISE_GROUPS,
            enable_fp_fusion=False,
        )


@lru_cache(256)  # lots differ in size
def each_alone(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Order and starts of records that are one row each."""
    starts = torch.arange(rows + 1, device=device)
    return starts[:-1], starts


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the device of a tensor, which need not be the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _new(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _tiles(size: int, block: int) -> int:
    return -(-size // block)


def _block(size: int, most: int) -> int:
    return max(_LEAST, min(most, _power_of_two(size)))


def _power_of_two(size: int) -> int:
    """Smallest power of two from `size` on."""
    return 1 << (size - 1).bit_length()
