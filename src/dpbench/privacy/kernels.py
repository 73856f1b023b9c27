"""Per-record gradients by the kernels of `native.cpp`: the same answers as the rules of `layers`, in one pass."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.privacy import native
from dpbench.privacy.gradients import InstantiatedGradients, ParameterGradients

_ORDER = (3, 2, 0, 1)
"""From a kernel's (height, width, inputs, outputs) to the parameter's (outputs, inputs, height, width)."""


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


def _dense(image: Tensor) -> Tensor:
    """(R, C, H, W) without gaps, channels first or last."""
    return image if image.is_contiguous(memory_format=torch.channels_last) else image.contiguous()


@lru_cache(256)  # lots differ in size
def _each_alone(rows: int) -> tuple[Tensor, Tensor]:
    """Order and starts of records that are one row each."""
    starts = torch.arange(rows + 1, device="cpu")
    return starts[:-1], starts


def _grouped(rows: Tensor, record_of: Tensor, records: int) -> tuple[Tensor, Tensor]:
    """Order and starts of records that are made of several rows.

    Args:
        rows: Their positions.
        record_of: Record of each of `rows`.
        records: Number of records.
    """
    starts = F.pad(torch.bincount(record_of, minlength=records).cumsum(0), (1, 0))
    return rows[torch.argsort(record_of, stable=True)], starts


class ConvolutionGradients(InstantiatedGradients):
    """Weight of a 2-d convolution without channel groups, zero-padded.

    Args:
        layer: The convolution.
        inputs: a, shape (R, in, height, width).
        outputs: Gradients of its output g, shape (R, out, height', width').
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
        self._norms = _new(0)  # filled with the gradients
        self._bias: list[Tensor] = []  # also

    def _with(self, members: tuple[Tensor, Tensor], factor: float, threshold: float | None) -> ConvolutionGradients:
        return ConvolutionGradients(self._layer, self._inputs, self._outputs, self._padding, members, factor, threshold)

    @cached_property
    def _stored(self) -> Tensor:  # not handed to the base class as a bound method: the cycle would hold its memory
        layer, (order, starts) = self._layer, self._members
        a, g, records = _dense(self._inputs), _dense(self._outputs), len(starts) - 1
        (_, inputs, *size), (_, outputs, *out_size) = a.shape, g.shape
        shape = (*size, inputs, *out_size, outputs, *layer.kernel_size, *layer.stride, *self._padding, *layer.dilation)
        first = a.is_contiguous(), g.is_contiguous()
        geometry = (ctypes.c_int64 * 18)(records, *shape, *first, torch.get_num_threads())
        dtype = torch.float32 if self._threshold is None else torch.int8
        weights = _new(records, *layer.kernel_size, inputs, outputs, dtype=dtype)
        self._norms, bias = _new(records), _new(records, outputs)
        scalars = ctypes.c_float(self._factor), ctypes.c_float(-1 if self._threshold is None else self._threshold)
        rows = _at(order, torch.int64), _at(starts, torch.int64)
        results = _at(weights, dtype), _at(self._norms), _at(bias)
        _kernel("dpbench_convolution")(geometry, _at(a), _at(g), *rows, *scalars, *results)
        self._bias.append(bias)
        return weights

    def squared_norms(self) -> Tensor:
        _ = self._stored
        return self._norms

    def bias(self) -> Tensor:
        """Gradients of the bias for each row, shape (R, out): a by-product of the weight's, where these are there."""
        return self._bias[0] if self._bias else self._outputs.sum((2, 3))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        name = "dpbench_weighted_sum" if self._threshold is None else "dpbench_weighted_signs"
        rows, weights = self._stored, weights.contiguous()
        total = _new(*rows.shape[1:])
        sizes = ctypes.c_int64(len(rows)), ctypes.c_int64(total.numel())
        _kernel(name)(_at(rows, rows.dtype), _at(weights), _at(total), *sizes, _threads())
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
        order, starts = self._members
        members = _grouped(order, record_of[torch.repeat_interleave(starts.diff())], records)
        return self._with(members, self._factor * factor, None)

    def plus(self, others: Sequence[ParameterGradients]) -> ParameterGradients:
        """Uses are so many more rows of each record."""
        uses = [self, *(use for use in others if isinstance(use, ConvolutionGradients) and self._goes_with(use))]
        if len(uses) <= len(others):
            return super().plus(others)
        inputs, outputs = torch.cat([use._inputs for use in uses]), torch.cat([use._outputs for use in uses])
        order = torch.cat([use._members[0] + k * len(self._inputs) for k, use in enumerate(uses)])
        record_of = torch.cat([torch.repeat_interleave(use._members[1].diff()) for use in uses])
        members = _grouped(order, record_of, len(self._members[1]) - 1)
        return ConvolutionGradients(self._layer, inputs, outputs, self._padding, members, self._factor, self._threshold)

    def _goes_with(self, use: ConvolutionGradients) -> bool:
        alike = self._inputs.shape == use._inputs.shape and self._padding == use._padding
        return alike and self._layer is use._layer and (self._factor, self._threshold) == (use._factor, use._threshold)

    def discretize(self, threshold: float) -> ConvolutionGradients:
        """The same after discretization, a byte a number."""
        signs = self._with(self._members, self._factor, threshold)
        signs._bias = self._bias
        return signs


def convolution_weights(layer: nn.Conv2d, a: Tensor, g: Tensor, padding: tuple[int, int]) -> ParameterGradients:
    """Per-record gradients of the weight; a (R, in, H, W), g (R, out, H', W'), padded with zeros."""
    return ConvolutionGradients(layer, a, g, padding)


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
