"""Gradients of one record discretized (gradient_compression_denoising_2020, Algorithm 2), and two milder variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients._convolution import ConvolutionGradients
from dpbench.privacy.gradients.parameter import (
    OuterProductGradients,
    ParameterGradients,
    ScaledGradients,
    flat_rows,
    per_row,
)
from dpbench.privacy.kernels import Kernels, suited

Values = Literal["signs", "threshold", "rescaled", "kept"]

_LARGEST = 1e30  # threshold; its square is still a floating-point number
_SLACK = 1e-4  # of the threshold for values that are kept: larger than rounding errors
_CACHED = 2**21  # numbers; larger gradients are recomputed in blocks of records of this size


def discretize(gradients: Tensor, threshold: float) -> Tensor:
    """+1 where a coordinate is above τ, −1 where it is below −τ, else 0 (also where it is NaN): always bounded."""
    return hardshrink(gradients, threshold).sign_()


def keep_large(gradients: Tensor, threshold: float) -> Tensor:
    """Coordinates from about τ times the root mean square of their record's gradient (R, ...) on stay, others become 0.

    Those of a record with NaN or infinity all become 0. "About": gradients of equal sizes, (a, −a) of two classes, lie
    at τ = 1 exactly, and their rounding errors, which depend on the other records of a batch, must not decide.
    """
    rows = flat_rows(gradients)
    size = max(rows.shape[1], 1)
    norms = torch.linalg.vector_norm(rows, dim=1)
    rms = norms / math.sqrt(size)
    multiple = (1 - _SLACK) * threshold
    smallest = per_row(multiple * rms, gradients)
    large = (gradients.abs() >= smallest) & smallest.isfinite()
    return torch.where(large, gradients, 0.0)


class DiscretizedGradients(ParameterGradients):
    """Another parameter's per-record gradients, discretized; everything after sees only these.

    Large parameters are gone through in blocks of records, twice (norms, then sums), so that memory stays bounded.

    Args:
        gradients: Before discretization.
        threshold: τ ≥ 0.
        records: R.
        size: Number of coordinates of the parameter.
        change: Function applied to the gradients at τ: `discretize` or `keep_large`.
    """

    def __init__(
        self,
        gradients: ParameterGradients,
        threshold: float,
        records: int,
        size: int,
        change: Callable[[Tensor, float], Tensor] = discretize,
    ) -> None:
        self._gradients = gradients
        self._threshold = threshold
        self._records = records
        self._size = size
        self._change = change
        self._stored: Tensor | None = None

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Pairs of some records and their discretized gradients, at most `_CACHED` numbers at once."""
        numbers = self._records * self._size
        if self._stored is None and numbers <= _CACHED:
            self._stored = self._change(self._gradients.per_record(), self._threshold)
        if self._stored is not None:
            yield slice(0, self._records), self._stored
            return
        step = max(1, _CACHED // self._size)
        for start in range(0, self._records, step):
            stop = min(start + step, self._records)
            positions = torch.arange(start, stop)
            piece = self._gradients.select(positions)
            yield slice(start, stop), self._change(piece.per_record(), self._threshold)

    def squared_norms(self) -> Tensor:
        norms = []
        for _, block in self._blocks():
            rows = flat_rows(block)
            # A sum of squares, without a root in between: whole numbers stay exact for signs.
            norms.append(torch.einsum("rd,rd->r", rows, rows))
        return torch.cat(norms)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total: Tensor | None = None
        for rows, block in self._blocks():
            block_sum = weights[rows] @ flat_rows(block)
            block_sum = block_sum.view(block.shape[1:])
            total = block_sum if total is None else total.add_(block_sum)
        assert total is not None
        return total

    def per_record(self) -> Tensor:
        blocks = [block for _, block in self._blocks()]
        return torch.cat(blocks)


class DiscretizedOuterProduct(ParameterGradients):
    """Discretized gradients of a linear layer with one position, by kernels that never build the outer products.

    Args:
        outputs: Gradients of the layer's outputs g, shape (R, out), which suit the kernels of a tier.
        inputs: The layer's inputs a, shape (R, in).
        threshold: τ ≥ 0.
        kernels: Kernels that suit both.
    """

    def __init__(self, outputs: Tensor, inputs: Tensor, threshold: float, kernels: Kernels) -> None:
        self._outputs = outputs
        self._inputs = inputs
        self._threshold = threshold
        self._kernels = kernels

    def squared_norms(self) -> Tensor:
        return self._kernels.count_outer(self._outputs, self._inputs, self._threshold)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._kernels.sum_outer(
            self._outputs,
            self._inputs,
            weights,
            self._threshold,
        )

    def per_record(self) -> Tensor:
        products = self._outputs[:, :, None] * self._inputs[:, None, :]
        return discretize(products, self._threshold)


def _signs(
    gradients: ParameterGradients,
    threshold: float,
    records: int,
    size: int,
) -> ParameterGradients:
    """Signs of one parameter's gradients, by the cheapest way that their form allows.

    Args:
        gradients: Gradients of R records.
        threshold: τ.
        records: R.
        size: Number of coordinates of the parameter.
    """
    if isinstance(gradients, ConvolutionGradients):
        return gradients.discretize(threshold)
    if isinstance(gradients, OuterProductGradients):
        g = gradients.outputs
        a = gradients.inputs
        positions = g.shape[1]
        kernels = suited(g, a) if positions == 1 else None
        if kernels is not None:
            return DiscretizedOuterProduct(
                g.squeeze(1),
                a.squeeze(1),
                threshold,
                kernels,
            )
    return DiscretizedGradients(gradients, threshold, records, size)


@dataclass(frozen=True)
class Discretization:
    r"""Each coordinate of a record's gradient becomes +1 above τ, −1 below −τ, else 0, or one of three milder variants.

    (gradient_compression_denoising_2020, 3.1.) A transform of records: clipping sees only its result, so that the
    sensitivity is the same whatever it does.

    * "signs": the paper's. A record with k coordinates beyond τ has norm √k, however small its gradient g was.
    * "threshold": ±τ in place of ±1. The norm, τ√k, is at most that of the gradient: the paper says of its own
      discretization that it "does not increase gradient norms", which holds for these values only.
    * "rescaled": the same signs at the norm of g, ±‖g‖/√k, so that a record that is nearly learned weighs little.
    * "kept": no signs; coordinates from about τ times the root mean square of the record's gradient by that parameter
      on keep their values.

    Signs of rounding errors depend on the other records of a batch: hence no τ = 0 where signs are taken.

    Attributes:
        threshold: τ > 0, in units of gradients; of root mean squares where values are kept, also 0.
        values: One of the four variants above.

    Raises:
        ConfigurationError: τ is out of range, or there are no such values.
    """

    threshold: float
    values: Values = "signs"

    def __post_init__(self) -> None:
        check_threshold(self.threshold, "discretization_threshold")
        if self.values not in get_args(Values):
            known = ", ".join(get_args(Values))
            raise ConfigurationError(f"unknown discretization_values {self.values!r}; known are {known}.")
        if not self.threshold and self.values != "kept":
            raise ConfigurationError(
                "discretization_threshold must be above 0, such as 1e-6: the sign of a gradient that is zero up to "
                "rounding depends on the other records of the batch, so no sensitivity holds for it."
            )

    def __call__(
        self,
        gradients: Sequence[ParameterGradients],
        records: int,
        sizes: Sequence[int],
    ) -> list[ParameterGradients]:
        """Discretize gradients.

        Args:
            gradients: Gradients of all parameters.
            records: R.
            sizes: Number of coordinates of each parameter.

        Returns:
            The discretized gradients by each parameter.
        """
        discretized: list[ParameterGradients] = []
        for part, size in zip(gradients, sizes, strict=True):
            if self.values == "kept":
                large = DiscretizedGradients(
                    part,
                    self.threshold,
                    records,
                    size,
                    keep_large,
                )
                discretized.append(large)
            else:
                discretized.append(_signs(part, self.threshold, records, size))
        if self.values == "threshold":
            at_threshold = torch.full((records,), self.threshold)
            return [ScaledGradients(part, at_threshold) for part in discretized]
        if self.values != "rescaled" or not discretized:
            return discretized
        scales = _squared_norms(gradients) / _squared_norms(discretized)
        scales = scales.sqrt()
        # Not finite: no coordinate is beyond τ, or a gradient is not finite.
        scales = torch.where(scales.isfinite(), scales, 0.0)
        return [ScaledGradients(part, scales) for part in discretized]


def _squared_norms(gradients: Sequence[ParameterGradients]) -> Tensor:
    """Squared norm of each record's gradient by all parameters, shape (R,)."""
    norms = [part.squared_norms() for part in gradients]
    return torch.stack(norms).sum(0)


def check_threshold(threshold: float | None, name: str) -> None:
    """Raise ConfigurationError unless the threshold is None or a number of at least 0."""
    if threshold is None:
        return
    if not 0 <= threshold <= _LARGEST:
        raise ConfigurationError(f"{name} must be a number from 0 to {_LARGEST:g} (or null), not {threshold}.")
