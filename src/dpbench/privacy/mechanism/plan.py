"""One frozen object from which noise, divisor and ledger entry of a release are all derived.

So what is accounted for cannot drift from what is done (jax_privacy's `DPExecutionPlan` is the model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.events import UNITS, Summands, SumQuery
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.sampling import Sampling

NoiseAllocation = Literal["equal", "proportional", "dimension"]
"""How noise is shared among groups: the same on every coordinate, σ_g = z√G·S_g, or σ_g = z√(D/d_g)·S_g."""


@dataclass(frozen=True)
class Statistic:
    """Something that is summed over the same lot beside the gradients: clipped counts, norms, metrics.

    Attributes:
        name: Shown in the ledger.
        size: Number of coordinates.
        bound: Upper bound of one record's l2 norm.
        noise_std: Of the noise on each coordinate of the sum.
        denominator: What the noised sum is divided by.
        of_units: Whether it is summed over units of the sampling, whatever the summands of the gradients are.
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
    """Sums, bounds and noise by which the records of one lot become one private release.

    Guarantee: each release is one Gaussian mechanism on sums over the lot with the multiplier `noise_multiplier`,
    statistics included; unit of privacy, neighboring relation and amplification are those of `sampling`, the
    sensitivities those of `queries`.

    Attributes:
        sampling: How lots are drawn.
        groups: Partition of the parameters, each with its bound S_g.
        noise_multiplier: z of the whole release, with sensitivities as of one added or removed record.
        sizes: Number of coordinates of each parameter.
        statistics: Released beside the gradients, at the cost of more noise on these.
        allocation: How noise is shared among the groups.
        summands: What the sums are over.

    Raises:
        ConfigurationError: A value is out of range, the groups are no partition, or the statistics alone cost more
            than `noise_multiplier` allows.
    """

    sampling: Sampling
    groups: tuple[VectorGroup, ...]
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
        covered = sorted(position for group in self.groups for position in group.parameters)
        if covered != list(range(len(self.sizes))):
            raise ConfigurationError("every trainable parameter must belong to exactly one group.")
        if self.allocation not in get_args(NoiseAllocation):
            raise ConfigurationError(
                f"unknown allocation {self.allocation!r}; known are {', '.join(get_args(NoiseAllocation))}."
            )
        _ = self.gradient_multiplier  # refuses what has no solution

    @property
    def denominator(self) -> float:
        """Divisor of the noised sum of gradients: the expected number of records, because the actual one is private."""
        return self.summands.denominator(self.sampling)

    def _changes(self, statistic: Statistic) -> int:
        """Number of bounds by which a statistic's sum moves between neighbors."""
        return self.sampling.record_changes if statistic.of_units else self.summands.changes(self.sampling)

    @cached_property
    def gradient_multiplier(self) -> float:
        """z_Δ, the multiplier that is left for the gradients: z⁻² = z_Δ⁻² + Σ (S_s/σ_s)² over the statistics.

        (adaptive_quantile_clipping_2021, Theorem 1, for any number of statistics.)
        """
        changes = max(1, self.summands.changes(self.sampling))  # z is meant for one changed summand
        spent = sum((self._changes(s) / changes * s.bound / s.noise_std) ** 2 for s in self.statistics)
        left = self.noise_multiplier**-2 - spent
        if not left > 0:
            raise ConfigurationError(
                f"the statistics beside the gradient ({_names(self.statistics)}) alone cost more "
                f"than noise_multiplier={self.noise_multiplier:.4g} allows (Theorem 1 has no solution): give them "
                f"more noise (their own multiplier is {1 / math.sqrt(spent):.4g}), or lower noise_multiplier."
            )
        return 1 / math.sqrt(left)

    @cached_property
    def noise_stds(self) -> tuple[float, ...]:
        """σ_g of each group, in units of the scaled gradient."""
        z, bounds = self.gradient_multiplier, [group.max_grad_norm for group in self.groups]
        if self.allocation == "proportional":
            return tuple(z * math.sqrt(len(bounds)) * bound for bound in bounds)
        if self.allocation == "dimension":
            dimensions = [sum(self.sizes[position] for position in group.parameters) for group in self.groups]
            return tuple(
                z * math.sqrt(sum(self.sizes) / own) * bound for own, bound in zip(dimensions, bounds, strict=True)
            )
        return (z * math.sqrt(sum(bound**2 for bound in bounds)),) * len(bounds)

    @cached_property
    def parameter_stds(self) -> tuple[float, ...]:
        """Noise on each coordinate of the summed gradient, for each parameter."""
        stds = [0.0] * len(self.sizes)
        for group, std in zip(self.groups, self.noise_stds, strict=True):
            for position, scale in zip(group.parameters, group.scales or (1.0,) * len(group.parameters), strict=True):
                stds[position] = std * scale
        return tuple(stds)

    @cached_property
    def parameter_bounds(self) -> tuple[float, ...]:
        """Most that one record adds to a coordinate of the summed gradient, for each parameter."""
        bounds = [0.0] * len(self.sizes)
        for group in self.groups:
            for position, scale in zip(group.parameters, group.scales or (1.0,) * len(group.parameters), strict=True):
                bounds[position] = group.max_grad_norm * scale
        return tuple(bounds)

    @cached_property
    def segments(self) -> tuple[tuple[int, float], ...]:
        """(length, noise standard deviation) along the flat sum: parameters, then statistics."""
        pieces = [*zip(self.sizes, self.parameter_stds, strict=True)]
        pieces += [(statistic.size, statistic.noise_std) for statistic in self.statistics]
        merged: list[tuple[int, float]] = []
        for size, std in pieces:
            if merged and merged[-1][1] == std:
                merged[-1] = (merged[-1][0] + size, std)
            else:
                merged.append((size, std))
        return tuple(merged)

    @cached_property
    def queries(self) -> tuple[SumQuery, ...]:
        """The release as the ledger records it."""
        changes, unit = self.summands.changes(self.sampling), self.summands.unit
        gradients = [
            SumQuery(group.name, changes * group.max_grad_norm, std, unit)
            for group, std in zip(self.groups, self.noise_stds, strict=True)
        ]
        others = [
            SumQuery(s.name, self._changes(s) * s.bound, s.noise_std, "" if s.of_units else unit)
            for s in self.statistics
        ]
        return (*gradients, *others)

    def privatize(self, total: Tensor, key: Sequence[int]) -> Tensor:
        """Add noise to the flat sums over all records of a lot (parameters, then statistics), once, in place."""
        return add_gaussian_noise(total, self.segments, key)

    def divide_statistics_(self, released: Tensor) -> Tensor:
        """Divide the noised statistics by their denominators, in place."""
        start = 0
        for statistic in self.statistics:
            released[start : start + statistic.size].div_(statistic.denominator)
            start += statistic.size
        return released


def _names(statistics: Sequence[Statistic]) -> str:
    names = [statistic.name for statistic in statistics]
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"... {len(names)} in all"])
