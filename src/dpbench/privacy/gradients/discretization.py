"""Gradients of one record discretized to {−1, 0, +1} (gradient_compression_denoising_2020, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients.convolution import ConvolutionGradients
from dpbench.privacy.gradients.parameter import OuterProductGradients, ParameterGradients
from dpbench.privacy.native import kernels

_LARGEST = 1e30  # threshold; its square is still a floating-point number
_CACHED = 2**21  # numbers; what is larger is computed again, in blocks of records of this size


def discretize(gradients: Tensor, threshold: float) -> Tensor:
    """+1 where a coordinate is above τ, −1 where it is below −τ, else 0 (also where it is NaN): always bounded."""
    return hardshrink(gradients, threshold).sign_()


class DiscretizedGradients(ParameterGradients):
    """Another parameter's per-record gradients, discretized; everything after sees only these.

    Large parameters are gone through in blocks of records, twice (norms, then sums), so that memory stays bounded.

    Args:
        gradients: Before discretization.
        threshold: τ ≥ 0.
        records: R.
        size: Number of coordinates of the parameter.
    """

    def __init__(self, gradients: ParameterGradients, threshold: float, records: int, size: int) -> None:
        self._gradients, self._threshold = gradients, threshold
        self._records, self._size = records, size
        self._stored: Tensor | None = None

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of some records and their discretized gradients, at most `_CACHED` numbers at once."""
        if self._stored is None and self._records * self._size <= _CACHED:
            self._stored = discretize(self._gradients.per_record(), self._threshold)
        if self._stored is not None:
            yield slice(0, self._records), self._stored
            return
        step = max(1, _CACHED // self._size)
        for start in range(0, self._records, step):
            rows = slice(start, min(start + step, self._records))
            piece = self._gradients.select(torch.arange(rows.start, rows.stop))
            yield rows, discretize(piece.per_record(), self._threshold)

    def squared_norms(self) -> Tensor:
        counts = [torch.linalg.vector_norm(block.flatten(1), ord=1, dim=1) for _, block in self._blocks()]
        return torch.cat(counts)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total: Tensor | None = None
        for rows, block in self._blocks():
            part = (weights[rows] @ block.flatten(1)).view(block.shape[1:])
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def per_record(self) -> Tensor:
        return torch.cat([block for _, block in self._blocks()])

    def select(self, records: Tensor) -> ParameterGradients:
        chosen = self._gradients.select(records)
        return DiscretizedGradients(chosen, self._threshold, len(records), self._size)


class DiscretizedOuterProduct(ParameterGradients):
    """Discretized gradients of a linear layer with one position, by kernels that never build the outer products.

    Args:
        outputs: Gradients of the layer's outputs g, shape (R, out).
        inputs: The layer's inputs a, shape (R, in).
        threshold: τ ≥ 0.
    """

    def __init__(self, outputs: Tensor, inputs: Tensor, threshold: float) -> None:
        self._outputs, self._inputs, self._threshold = outputs, inputs, threshold

    def squared_norms(self) -> Tensor:
        return kernels.count_outer(self._outputs, self._inputs, self._threshold)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return kernels.sum_outer(self._outputs, self._inputs, weights, self._threshold)

    def per_record(self) -> Tensor:
        return discretize(self._outputs[:, :, None] * self._inputs[:, None, :], self._threshold)

    def select(self, records: Tensor) -> ParameterGradients:
        return DiscretizedOuterProduct(self._outputs[records], self._inputs[records], self._threshold)


def _discretized(gradients: ParameterGradients, threshold: float, records: int, size: int) -> ParameterGradients:
    if isinstance(gradients, ConvolutionGradients):
        return gradients.discretize(threshold)
    if isinstance(gradients, OuterProductGradients):
        g, a = gradients.outputs, gradients.inputs
        if g.shape[1] == 1 and kernels.suits(g, a):
            return DiscretizedOuterProduct(g.squeeze(1), a.squeeze(1), threshold)
    return DiscretizedGradients(gradients, threshold, records, size)


@dataclass(frozen=True)
class Discretization:
    """Each coordinate of a record's gradient becomes +1 above τ, −1 below −τ, else 0.

    (gradient_compression_denoising_2020, 3.1.) A transform of records: clipping sees only its result.

    Attributes:
        threshold: τ ≥ 0.

    Raises:
        ConfigurationError: τ is out of range.
    """

    threshold: float

    def __post_init__(self) -> None:
        check_threshold(self.threshold, "discretization_threshold")

    def __call__(
        self, gradients: Sequence[ParameterGradients], records: int, sizes: Sequence[int]
    ) -> list[ParameterGradients]:
        """Discretize the gradients of R records by all parameters of the given numbers of coordinates."""
        pairs = zip(gradients, sizes, strict=True)
        return [_discretized(parameter, self.threshold, records, size) for parameter, size in pairs]


def check_threshold(threshold: float | None, name: str) -> None:
    """Raise ConfigurationError unless the threshold is None or a number from 0 on."""
    if threshold is not None and not 0 <= threshold <= _LARGEST:
        raise ConfigurationError(f"{name} must be a number from 0 to {_LARGEST:g} (or null), not {threshold}.")
