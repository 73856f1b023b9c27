"""Clipping bounds that follow the gradients, by statistics that are noised and released in the same query.

An adaptation defines statistics that are summed with the gradients (`statistics`, `measure`), and computes the bounds
from their released values (`next_bounds`). The last step is post-processing: it sees nothing else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError, shown
from dpbench.privacy.mechanism.clipping import LARGEST, SMALLEST, Bounds, Groups, VectorGroup, record_by_record
from dpbench.privacy.mechanism.plan import Statistic

_PAPERS_RATIO = 2.5 / 0.725  # three_tools_2018: σ_l2 = 2.5 with σ = z√G = 0.725 on each layer


class Adaptation(ABC):
    """Rule by which bounds follow the gradients, with one statistic for each group."""

    @abstractmethod
    def statistics(
        self,
        groups: Sequence[VectorGroup],
        expected_records: float,
        noise_multiplier: float,
    ) -> tuple[Statistic, ...]:
        """Statistics that are summed with the gradients, with bound and noise, for z = `noise_multiplier`."""

    @abstractmethod
    def measure(self, squared_norms: Tensor, groups: Sequence[VectorGroup]) -> Tensor:
        """Sums of the statistics over a batch.

        A user's own rule gets one record at a time, and its values are clipped to the bounds of `statistics`.

        Args:
            squared_norms: The norms that are clipped, before that: after any transform, shape (groups, R).
            groups: Groups with the bounds of this batch.

        Returns:
            Shape (groups,).
        """

    @abstractmethod
    def next_bounds(self, groups: Sequence[VectorGroup], released: Sequence[float]) -> Bounds:
        """Bounds of the next batch.

        Args:
            groups: Groups with the bounds of this batch.
            released: Noised sums divided by the expected number of records, one for each group.
        """


def with_bounds(groups: Sequence[VectorGroup], bounds: Sequence[float]) -> Groups:
    """Replace the bounds of groups, kept in the range that float32 can clip and noise (a dead layer has norms of 0)."""
    replaced = []
    for group, bound in zip(groups, bounds, strict=True):
        clamped = min(max(bound, SMALLEST), LARGEST)
        replaced.append(replace(group, max_grad_norm=clamped))
    return tuple(replaced)


@dataclass(frozen=True)
class QuantileBounds(Adaptation):
    r"""Track a quantile of the norms (adaptive_quantile_clipping_2021).

    With :math:`b_i` = 1 if record i has a norm of at most C, the centered count :math:`\sum_i (b_i - 1/2)` moves by
    at most ½ if a record is added or removed. It is noised with σ_b and divided by the expected number m of records:
    :math:`\tilde b = \tfrac{1}{m}(\sum_i (b_i - \tfrac12) + \mathcal N(0, \sigma_b^2)) + \tfrac12`, and then

    geometric (at most a factor e⁵ in one step): :math:`C \leftarrow C \exp(-\eta(\tilde b - \gamma))`,
    linear: :math:`C \leftarrow C - \eta(\tilde b - \gamma)`.

    Attributes:
        quantile: γ in (0, 1), the share of records that should not be clipped.
        learning_rate: η_C > 0.
        update: "geometric" or "linear"; a linear step never takes more than half of the bound away.
        count_noise_std: σ_b, on the sum; None takes m/20.

    Raises:
        ConfigurationError: A value is out of range.
    """

    quantile: float = 0.5
    learning_rate: float = 0.2
    update: Literal["geometric", "linear"] = "geometric"
    count_noise_std: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise ConfigurationError(f"quantile must lie strictly between 0 and 1, not {self.quantile}.")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigurationError(f"clip_learning_rate must be a positive number, not {self.learning_rate}.")
        if self.count_noise_std is not None and not 0 < self.count_noise_std < math.inf:
            raise ConfigurationError(f"count_noise_std must be a positive number, not {self.count_noise_std}.")

    def statistics(
        self,
        groups: Sequence[VectorGroup],
        expected_records: float,
        noise_multiplier: float,
    ) -> tuple[Statistic, ...]:
        std = self.count_noise_std
        if std is None:
            std = expected_records / 20
        return tuple(Statistic(f"count/{group.name}", 1, 0.5, std, expected_records) for group in groups)

    def measure(self, squared_norms: Tensor, groups: Sequence[VectorGroup]) -> Tensor:
        bounds = [group.max_grad_norm for group in groups]
        limits = squared_norms.new_tensor(bounds)
        is_below = squared_norms.sqrt() <= limits[:, None]
        centered = is_below.to(squared_norms.dtype).sub_(0.5)
        return centered.sum(1)

    def next_bounds(self, groups: Sequence[VectorGroup], released: Sequence[float]) -> Bounds:
        bounds = []
        for group, centered in zip(groups, released, strict=True):
            bounds.append(self._next(group.max_grad_norm, centered + 0.5 - self.quantile))
        return tuple(bounds)

    def _next(self, bound: float, excess: float) -> float:
        """Move a bound against the excess of the share of records below it over the quantile."""
        if self.update == "geometric":
            # Noise alone could make `exp` overflow.
            exponent = max(min(-self.learning_rate * excess, 5.0), -5.0)
            return bound * math.exp(exponent)
        return max(bound - self.learning_rate * excess, bound / 2)


@dataclass(frozen=True)
class MeanNormBounds(Adaptation):
    r"""Follow a multiple of the private mean norm of the previous batch (three_tools_2018, 2.2).

    .. math::
        C_t = \frac{\alpha}{m} \Big( \sum_i \min(\|g_i\|, \beta C_{t-1})
              + \mathcal N(0, (\sigma_{l2} \beta C_{t-1})^2) \Big)

    for each group. The noise belongs to the sum, before the division by the expected number m of records.

    Attributes:
        alpha: α > 0; around 1 on all data sets of the paper.
        beta: β > 1: norms are clipped at β times the bound.
        norm_noise_multiplier: σ_l2, noise of the sum of norms in units of its sensitivity. None takes the paper's
            share of the budget: 2.5/0.725 times the noise z√G on each of G layers, which raises z_Δ by 4.5 %.

    The bound stays positive: noise takes away at most the factor β in one step.

    Raises:
        ConfigurationError: A value is out of range.
    """

    alpha: float = 1.1
    beta: float = 2.0
    norm_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigurationError(f"alpha must be a positive number, not {self.alpha}.")
        if not 1 < self.beta < math.inf:
            raise ConfigurationError(f"beta must be larger than 1, not {self.beta}: norms are clipped at beta * bound.")
        if self.norm_noise_multiplier is not None and not 0 < self.norm_noise_multiplier < math.inf:
            raise ConfigurationError(
                f"norm_noise_multiplier must be a positive number, not {self.norm_noise_multiplier}."
            )

    def statistics(
        self,
        groups: Sequence[VectorGroup],
        expected_records: float,
        noise_multiplier: float,
    ) -> tuple[Statistic, ...]:
        multiplier = self.norm_noise_multiplier
        if multiplier is None:
            multiplier = _PAPERS_RATIO * noise_multiplier * math.sqrt(len(groups))
        statistics = []
        for group in groups:
            bound = self.beta * group.max_grad_norm
            statistics.append(Statistic(f"norm/{group.name}", 1, bound, multiplier * bound, expected_records))
        return tuple(statistics)

    def measure(self, squared_norms: Tensor, groups: Sequence[VectorGroup]) -> Tensor:
        bounds = [self.beta * group.max_grad_norm for group in groups]
        limits = squared_norms.new_tensor(bounds)
        bounded = torch.minimum(squared_norms.sqrt(), limits[:, None])
        return bounded.sum(1)

    def next_bounds(self, groups: Sequence[VectorGroup], released: Sequence[float]) -> Bounds:
        bounds = []
        for group, mean in zip(groups, released, strict=True):
            smallest = group.max_grad_norm / self.beta
            bounds.append(max(self.alpha * mean, smallest))
        return tuple(bounds)


class BoundedSums:
    """Sums of an adaptation's statistics over a batch.

    Guarantee: adding or removing one record moves each sum by at most the bound that its statistic states, even if
    a subclass measures something else than its parent, with the statistics that it inherits.

    Args:
        adaptation: The rule by which bounds follow the gradients.
    """

    def __init__(self, adaptation: Adaptation) -> None:
        self._adaptation = adaptation
        self._is_ours = type(adaptation) in (QuantileBounds, MeanNormBounds)

    def __call__(
        self,
        squared_norms: Tensor,
        groups: Sequence[VectorGroup],
        statistics: Sequence[Statistic],
    ) -> Tensor:
        """Sums, shape (groups,).

        Args:
            squared_norms: See `Adaptation.measure`.
            groups: The groups with the bounds of this batch.
            statistics: The statistics of this batch.

        Raises:
            ConfigurationError: There is not one statistic and one sum for each group.
        """
        if self._is_ours:
            return self._adaptation.measure(squared_norms, groups)
        sizes = [statistic.size for statistic in statistics]
        if sizes != [1] * len(groups):
            raise ConfigurationError(
                f"{type(self._adaptation).__name__}.statistics must return one statistic of size 1 for each of "
                f"{len(groups)} groups, not {len(sizes)} of sizes {sizes}."
            )
        if not squared_norms.shape[1]:
            return squared_norms.new_zeros(len(groups))

        def measure_one(record: Tensor) -> Tensor:
            measured = self._adaptation.measure(record[:, None], groups)
            # Others would be added where they do not belong.
            if not isinstance(measured, Tensor) or measured.shape != (len(groups),):
                raise ConfigurationError(
                    f"{type(self._adaptation).__name__}.measure must return a tensor of shape ({len(groups)},), a sum "
                    f"over the records for each group, not {shown(getattr(measured, 'shape', measured))}: add over the "
                    "records, as in squared_norms.sum(1)."
                )
            return measured

        measured = record_by_record(measure_one, squared_norms.t().clone()).nan_to_num(nan=0.0)
        limits = measured.new_tensor([statistic.bound for statistic in statistics])
        return torch.clamp(measured, -limits, limits).sum(0)
