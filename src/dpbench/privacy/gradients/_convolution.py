"""Per-record gradients of convolutions by compiled kernels: the same answers as the rule of `layers`, in one pass."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.privacy.gradients.parameter import InstantiatedGradients, ParameterGradients
from dpbench.privacy.native import kernels

_ORDER = (3, 2, 0, 1)
"""From a kernel's (height, width, inputs, outputs) to the parameter's (outputs, inputs, height, width)."""


@lru_cache(256)  # batches differ in size
def _each_alone(rows: int) -> tuple[Tensor, Tensor]:
    """Order and starts of records that are one row each."""
    starts = torch.arange(rows + 1, device="cpu")
    return starts[:-1], starts


def _grouped(rows: Tensor, record_of: Tensor, records: int) -> tuple[Tensor, Tensor]:
    """Order and starts of records with several rows.

    Args:
        rows: Their positions.
        record_of: Record of each of `rows`.
        records: Number of records.
    """
    # `bincount` would wait for the GPU to know its size.
    counts = record_of.new_zeros(records).index_add_(0, record_of, torch.ones_like(record_of))
    starts = F.pad(counts.cumsum(0), (1, 0))
    order = rows[torch.argsort(record_of, stable=True)]
    return order, starts


def _record_of(order: Tensor, starts: Tensor) -> Tensor:
    """Record of each row in the order."""
    return torch.repeat_interleave(starts.diff(), output_size=len(order))


def weight_gradient(
    layer: Any,
    a: Tensor,
    g: Tensor,
    weight: Tensor,
    padding: Any,
    records: int,
) -> Tensor:
    """PyTorch's weight gradient, of `records` records that lie side by side in the channels."""
    dimensions = a.dim() - 2
    gradients = torch.ops.aten.convolution_backward(
        g,
        a,
        weight,
        None,  # no bias
        layer.stride,
        padding,
        layer.dilation,
        False,  # not transposed
        [0] * dimensions,  # no output padding
        records * layer.groups,
        [False, True, False],  # of input, weight and bias
    )
    return cast(Tensor, gradients[1])


class ConvolutionGradients(InstantiatedGradients):
    """Weight of a 2-d convolution without channel groups, zero-padded, by the kernels in C++.

    Args:
        layer: The convolution.
        inputs: a, shape (R, in, height, width).
        outputs: Gradients of its output g, shape (R, out, height', width').
        padding: Zeros on each side, (vertical, horizontal).
        members: Rows of each record as (their order, where each record starts in it), or None for one row each.
        factor: Multiplies the sum over a record's rows.
        threshold: τ of the discretization, or None.
    """

    _layout: tuple[int, ...] | None = _ORDER

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
        self._order = self._layout
        self._layer = layer
        self._inputs = inputs
        self._outputs = outputs
        self._padding = padding
        self._is_each_alone = members is None
        self._members = self._each_alone(inputs) if members is None else members
        self._factor = factor
        self._threshold = threshold
        self._norms = inputs.new_empty(0)  # until the gradients are computed
        self._bias: list[Tensor] = []  # empty until then; shared with the result of `discretize`

    @staticmethod
    def _each_alone(inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Members of records that are one row of the inputs each."""
        return _each_alone(len(inputs))

    def _with(
        self,
        members: tuple[Tensor, Tensor],
        factor: float,
        threshold: float | None,
    ) -> Self:
        """Gradients by the same inputs and outputs, of other records."""
        return type(self)(
            self._layer,
            self._inputs,
            self._outputs,
            self._padding,
            members,
            factor,
            threshold,
        )

    # Not handed to the base class as a bound method: the cycle would hold its memory.
    @cached_property
    def _stored(self) -> Tensor:
        gradients = kernels.convolution(
            self._layer,
            self._inputs,
            self._outputs,
            self._padding,
            self._members,
            self._factor,
            self._threshold,
        )
        self._norms = gradients.squared_norms
        self._bias.append(gradients.bias)
        return gradients.weights

    def squared_norms(self) -> Tensor:
        _ = self._stored  # computes the norms too
        return self._norms

    def bias(self) -> Tensor:
        """Gradients of the bias for each row, shape (R, out): a by-product of the weight's, once these are computed."""
        if self._bias:
            return self._bias[0]
        return self._outputs.sum((2, 3))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return kernels.weighted_sum(self._stored, weights).permute(_ORDER)

    def per_record(self) -> Tensor:
        rows: Tensor = super().per_record().to(self._inputs.dtype)
        return rows

    def merge(self, record_of: Tensor, records: int, factor: float) -> ParameterGradients:
        order, starts = self._members
        record_of_row = record_of[_record_of(order, starts)]
        members = _grouped(order, record_of_row, records)
        return self._with(members, self._factor * factor, None)

    def discretize(self, threshold: float) -> Self:
        """These gradients, discretized to {−1, 0, +1} at ±`threshold`, in one byte a coordinate."""
        signs = self._with(self._members, self._factor, threshold)
        signs._bias = self._bias
        return signs
