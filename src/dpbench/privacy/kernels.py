"""Per-record gradients by the kernels of `native.cpp`: the same answers as the rules of `layers`, in one pass."""

from __future__ import annotations

import ctypes
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.privacy import native
from dpbench.privacy.gradients import InstantiatedGradients, ParameterGradients

_ORDER = (3, 2, 0, 1)
"""From a kernel's (height, width, inputs, outputs) to the parameter's (outputs, inputs, height, width)."""


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())


def _kernel(name: str) -> Any:
    library = native.library()
    assert library is not None
    function = getattr(library, name)
    function.restype = None
    return function


def suits(*tensors: Tensor) -> bool:
    """Whether the kernels can be had and know this device and precision."""
    return all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors) and native.library() is not None


def insisted() -> bool:
    """Whether the kernels are to be used wherever they can be, without timing."""
    return native.mode() == "on"


def _rows(image: Tensor) -> Tensor:
    """(R, C, H, W) → (R, H, W, C) without gaps; a view where the image is channels-last."""
    return image.permute(0, 2, 3, 1).contiguous()


@lru_cache(256)  # lots differ in size
def _each_alone(rows: int) -> tuple[Tensor, Tensor]:
    """Order and starts of records that are one row each."""
    starts = torch.arange(rows + 1)
    return starts[:-1], starts


class ConvolutionGradients(InstantiatedGradients):
    """Weight of a 2-d convolution without channel groups, zero-padded.

    Args:
        layer: The convolution.
        inputs: a, shape (R, height, width, in).
        outputs: Gradients of its output g, shape (R, height', width', out).
        padding: Zeros on each side, (vertical, horizontal).
        members: Rows of each record as (their order, where each record starts in it), or None for one row each.
        factor: Multiplies the sum over a record's rows.
        threshold: τ of the discretization, or None.
    """

    def __init__(
        self,
        layer: nn.Conv2d,
        inputs: Tensor,
        outputs: Tensor,
        padding: tuple[int, int],
        members: tuple[Tensor, Tensor] | None = None,
        factor: float = 1.0,
        threshold: float | None = None,
    ) -> None:
        self._order = _ORDER
        self._layer, self._inputs, self._outputs, self._padding = layer, inputs, outputs, padding
        self._members = _each_alone(len(inputs)) if members is None else members
        self._factor, self._threshold = factor, threshold
        self._norms = torch.empty(0)  # filled with the gradients
        self._bias: list[Tensor] = []  # also

    def _with(self, members: tuple[Tensor, Tensor], factor: float, threshold: float | None) -> ConvolutionGradients:
        return ConvolutionGradients(self._layer, self._inputs, self._outputs, self._padding, members, factor, threshold)

    @cached_property
    def _stored(self) -> Tensor:  # not handed to the base class as a bound method: the cycle would hold its memory
        layer, (order, starts) = self._layer, self._members
        a, g, records = self._inputs, self._outputs, len(starts) - 1
        shape = (*a.shape[1:], *g.shape[1:], *layer.kernel_size, *layer.stride, *self._padding, *layer.dilation)
        geometry = (ctypes.c_int64 * 16)(records, *shape, torch.get_num_threads())
        dtype = torch.float32 if self._threshold is None else torch.int8
        weights = torch.empty(records, *layer.kernel_size, a.shape[3], g.shape[3], dtype=dtype)
        self._norms, bias = torch.empty(records), torch.empty(records, g.shape[3])
        scalars = ctypes.c_float(self._factor), ctypes.c_float(-1 if self._threshold is None else self._threshold)
        _kernel("dpbench_convolution")(
            geometry, *map(_at, (a, g, order, starts)), *scalars, *map(_at, (weights, self._norms, bias))
        )
        self._bias.append(bias)
        return weights

    def squared_norms(self) -> Tensor:
        _ = self._stored
        return self._norms

    def bias(self) -> Tensor:
        """Gradients of the bias for each row, shape (R, out): a by-product of the weight's, where these are there."""
        return self._bias[0] if self._bias else self._outputs.sum((1, 2))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        name = "dpbench_weighted_sum" if self._threshold is None else "dpbench_weighted_signs"
        rows, weights = self._stored, weights.contiguous()
        total = torch.empty(rows.shape[1:])
        sizes = ctypes.c_int64(len(rows)), ctypes.c_int64(total.numel())
        _kernel(name)(*map(_at, (rows, weights, total)), *sizes, _threads())
        summed: Tensor = total.permute(_ORDER)
        return summed

    def per_record(self) -> Tensor:
        rows: Tensor = super().per_record().to(self._inputs.dtype)
        return rows

    def select(self, records: Tensor) -> ParameterGradients:
        order, starts = self._members
        counts = starts.diff()[records]
        chosen = [order[starts[r] : starts[r + 1]] for r in records.tolist()]
        members = torch.cat([order[:0], *chosen]), torch.cat([starts[:1] * 0, counts.cumsum(0)])
        return self._with(members, self._factor, self._threshold)

    def merge(self, record_of: Tensor, records: int, factor: float) -> ParameterGradients:
        order = torch.argsort(record_of, stable=True)
        counts = torch.bincount(record_of, minlength=records)
        return self._with((order, torch.cat([counts[:0], counts.new_zeros(1), counts.cumsum(0)])), factor, None)

    def discretize(self, threshold: float) -> ConvolutionGradients:
        """The same after discretization, a byte a number."""
        signs = self._with(self._members, self._factor, threshold)
        signs._bias = self._bias
        return signs


def convolution_weights(layer: nn.Conv2d, a: Tensor, g: Tensor, padding: tuple[int, int]) -> ParameterGradients:
    """Per-record gradients of the weight; a (R, in, H, W), g (R, out, H', W'), padded with zeros."""
    return ConvolutionGradients(layer, _rows(a), _rows(g), padding)


def group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row gradients of scale and shift, (R, C) each; x and g (R, C, H, W)."""
    x, g = _rows(x), _rows(g)
    records, height, width, channels = x.shape
    scale, shift = torch.empty(2, records, channels).unbind()
    sizes = (ctypes.c_int64(n) for n in (records, height * width, channels, layer.num_groups))
    _kernel("dpbench_group_norm")(
        _at(x), _at(g), _at(scale), _at(shift), *sizes, ctypes.c_double(layer.eps), _threads()
    )
    return scale, shift


def count_outer(g: Tensor, a: Tensor, threshold: float) -> Tensor:
    """How many coordinates of each g_r a_rᵀ are beyond ±τ, shape (R,), from g (R, out) and a (R, in)."""
    counts = torch.empty(len(g))
    _outer("dpbench_count_outer", g, a, threshold, counts)
    return counts


def sum_outer(g: Tensor, a: Tensor, weights: Tensor, threshold: float) -> Tensor:
    """Sum over records of `weights` (R,) times the signs of what is beyond ±τ in g_r a_rᵀ, shape (out, in)."""
    total = torch.empty(g.shape[1], a.shape[1])
    _outer("dpbench_sum_outer", g, a, threshold, weights, total)
    return total


def _outer(name: str, g: Tensor, a: Tensor, threshold: float, *more: Tensor) -> None:
    tensors = [x.contiguous() for x in (g, a, *more)]
    sizes = (ctypes.c_int64(n) for n in (*g.shape, a.shape[1]))
    _kernel(name)(*map(_at, tensors), *sizes, ctypes.c_float(threshold), _threads())


def add_noise(total: Tensor, start: int, std: float, key: bytes) -> None:
    """Add `std` times the numbers `start`, `start` + 1, ... of a stream of standard normal numbers, in place.

    Args:
        total: Consecutive part of a flat sum, float32 on the CPU.
        start: Its first coordinate's place in the stream.
        std: Standard deviation.
        key: 32 bytes of ChaCha20, which yields the stream.
    """
    words = (ctypes.c_uint32 * 8).from_buffer_copy(key)
    sizes = ctypes.c_int64(start), ctypes.c_int64(total.numel())
    _kernel("dpbench_add_noise")(_at(total), *sizes, ctypes.c_float(std), words, _threads())
