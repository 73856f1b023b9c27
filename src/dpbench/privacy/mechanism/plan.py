"""One frozen object from which noise, divisor and ledger entry of a release are all derived.

So the accounting cannot drift from the computation (jax_privacy's `DPExecutionPlan` is the model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.events import UNITS, Queries, Summands, SumQuery
from dpbench.privacy.mechanism.clipping import Groups
from dpbench.privacy.sampling import Sampling

NoiseAllocation = Literal["equal", "proportional", "dimension"]
"""How noise is shared among groups: the same on every coordinate, σ_g = z√G·S_g, or σ_g = z√(D/d_g)·S_g."""


@dataclass(frozen=True)
class Statistic:
    """A sum over the same batch as the gradients: clipped counts, norms, metrics.

    Attributes:
        name: Shown in the ledger.
        size: Number of coordinates.
        bound: Upper bound of one record's l2 norm.
        noise_std: Standard deviation of the noise on each coordinate of the sum.
        denominator: Divisor of the noised sum.
        of_units: True if it is summed over units of the sampling, whatever the summands of the gradients.
    """

    name: str
    size: int
    bound: float
    noise_std: float
    denominator: float = 1.0
    of_units: bool = False

    def __post_init__(self) -> None:
        for name, value in (("bound", self.bound), ("noise", self.noise_std)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"the {name} of {self.name} must be a positive number, not {value}.")


@dataclass(frozen=True)
class ReleasePlan:
    """Sums, bounds and noise by which the records of one batch become one private release.

    Guarantee: each release is one Gaussian mechanism on sums over the batch with the multiplier `noise_multiplier`,
    statistics included; unit of privacy, neighboring relation and amplification are those of `sampling`, the
    sensitivities those of `queries`.

    Attributes:
        sampling: How batches are drawn.
        groups: Partition of the parameters, each with its bound S_g.
        noise_multiplier: z of the whole release, with sensitivities as of one added or removed record.
        sizes: Number of coordinates of each parameter.
        statistics: Statistics released with the gradients, at the cost of more noise on these.
        allocation: How noise is shared among the groups.
        summands: Units over which the sums go.

    Raises:
        ConfigurationError: A value is out of range, the groups are no partition, or the statistics alone cost more
            than `noise_multiplier` allows.
    """

    sampling: Sampling
    groups: Groups
    noise_multiplier: float
    sizes: tuple[int, ...]
    statistics: tuple[Statistic, ...] = ()
    allocation: NoiseAllocation = "equal"
    summands: Summands = UNITS

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ConfigurationError(
                f"noise_multiplier must be a positive number, not {self.noise_multiplier}; "
                "use strategy=none for training without privacy."
            )
        positions: list[int] = []
        for group in self.groups:
            positions.extend(group.parameters)
        every_position = list(range(len(self.sizes)))
        if sorted(positions) != every_position:
            raise ConfigurationError("every trainable parameter must belong to exactly one group.")
        allocations = get_args(NoiseAllocation)
        if self.allocation not in allocations:
            raise ConfigurationError(f"unknown allocation {self.allocation!r}; known are {', '.join(allocations)}.")
        # Computed here already, because it refuses statistics that cost more than the whole release may.
        _ = self.gradient_multiplier

    @property
    def denominator(self) -> float:
        """Divisor of the noised sum of gradients: the expected number of records, because the actual one is private."""
        return self.summands.denominator(self.sampling)

    @property
    def statistics_of_records(self) -> tuple[Statistic, ...]:
        """The statistics by which bounds adapt: private metrics are sums over units."""
        return tuple(statistic for statistic in self.statistics if not statistic.of_units)

    def _changes(self, statistic: Statistic) -> int:
        """Number of bounds by which a statistic's sum moves between neighbors."""
        if statistic.of_units:
            return self.sampling.record_changes
        return self.summands.changes(self.sampling)

    @cached_property
    def gradient_multiplier(self) -> float:
        """z_Δ, the multiplier that is left for the gradients: z⁻² = z_Δ⁻² + Σ (S_s/σ_s)² over the statistics.

        (adaptive_quantile_clipping_2021, Theorem 1, for any number of statistics.)
        """
        # z is stated for one changed summand: sensitivities are counted in the changes of the gradients' sums.
        changes = max(1, self.summands.changes(self.sampling))
        costs = []
        for statistic in self.statistics:
            relative_changes = self._changes(statistic) / changes
            ratio = relative_changes * statistic.bound / statistic.noise_std
            costs.append(ratio**2)
        spent = sum(costs)
        remaining = self.noise_multiplier**-2 - spent
        if not remaining > 0:
            own_multiplier = 1 / math.sqrt(spent)
            names = ", ".join(statistic.name for statistic in self.statistics[:4])
            raise ConfigurationError(
                f"the statistics released with the gradient ({names}) alone cost more than "
                f"noise_multiplier={self.noise_multiplier:.4g} allows: give them more noise (their own multiplier is "
                f"{own_multiplier:.4g}), or lower noise_multiplier."
            )
        return 1 / math.sqrt(remaining)

    @cached_property
    def noise_stds(self) -> tuple[float, ...]:
        """σ_g of each group, in units of the scaled gradient."""
        z = self.gradient_multiplier
        bounds = [group.max_grad_norm for group in self.groups]
        if self.allocation == "equal":
            squares = [bound**2 for bound in bounds]
            total_bound = math.sqrt(sum(squares))
            std = z * total_bound
            return (std,) * len(bounds)
        if self.allocation == "proportional":
            factor = z * math.sqrt(len(bounds))
            return tuple(factor * bound for bound in bounds)
        total = sum(self.sizes)
        stds = []
        for group in self.groups:
            dimension = sum(self.sizes[position] for position in group.parameters)
            factor = z * math.sqrt(total / dimension)
            stds.append(factor * group.max_grad_norm)
        return tuple(stds)

    @cached_property
    def parameter_stds(self) -> tuple[float, ...]:
        """Noise on each coordinate of the summed gradient, for each parameter."""
        # σ_g is for gradients that are divided by α_j, and these are not.
        return self._by_parameter(self.noise_stds)

    @cached_property
    def gradient_stds(self) -> tuple[float, ...]:
        """Noise on each coordinate of the released gradient, which is divided, for each parameter."""
        return tuple(std / self.denominator for std in self.parameter_stds)

    @cached_property
    def parameter_bounds(self) -> tuple[float, ...]:
        """Most that one record adds to a coordinate of the summed gradient, for each parameter."""
        return self._by_parameter([group.max_grad_norm for group in self.groups])

    def _by_parameter(self, by_group: Sequence[float]) -> tuple[float, ...]:
        """Numbers of the groups, times the scale of each of their parameters."""
        values = [0.0] * len(self.sizes)
        for group, value in zip(self.groups, by_group, strict=True):
            scales = group.scales or (1.0,) * len(group.parameters)
            for position, scale in zip(group.parameters, scales, strict=True):
                values[position] = value * scale
        return tuple(values)

    @cached_property
    def segments(self) -> tuple[tuple[int, float], ...]:
        """(length, noise standard deviation) along the flat sum: parameters, then statistics."""
        segments = list(zip(self.sizes, self.parameter_stds, strict=True))
        for statistic in self.statistics:
            segments.append((statistic.size, statistic.noise_std))
        merged: list[tuple[int, float]] = []
        for size, std in segments:
            # Neighbors with equal noise become one segment: each is one call of the native kernel.
            if merged and merged[-1][1] == std:
                length, _ = merged[-1]
                merged[-1] = (length + size, std)
            else:
                merged.append((size, std))
        return tuple(merged)

    @cached_property
    def queries(self) -> Queries:
        """The release as the ledger records it: one query for each group, then one for each statistic."""
        changes = self.summands.changes(self.sampling)
        unit = self.summands.unit
        queries = []
        for group, std in zip(self.groups, self.noise_stds, strict=True):
            queries.append(SumQuery(group.name, changes * group.max_grad_norm, std, unit))
        for statistic in self.statistics:
            sensitivity = self._changes(statistic) * statistic.bound
            unit_of_statistic = "" if statistic.of_units else unit
            queries.append(SumQuery(statistic.name, sensitivity, statistic.noise_std, unit_of_statistic))
        return tuple(queries)

    def divide_statistics_(self, released: Tensor) -> Tensor:
        """Divide the noised statistics by their denominators, in place."""
        start = 0
        for statistic in self.statistics:
            end = start + statistic.size
            released[start:end].div_(statistic.denominator)
            start = end
        return released
