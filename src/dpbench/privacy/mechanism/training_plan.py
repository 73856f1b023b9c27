"""The plan of a whole training: sampling × summands × clipping recipe × noise, and how they move over the steps.

One frozen object names the run (its digest is part of the key of the noise) and heads the ledger. The plan of each
release, and with it sensitivities, noise, divisor and cost, is derived from it and from nothing else, so that the
accounting cannot drift from the computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from dpbench.canonical import digest_of, name_of
from dpbench.errors import ConfigurationError
from dpbench.privacy.events import UNITS, Event, Summands, equivalent_queries
from dpbench.privacy.mechanism._description import describe
from dpbench.privacy.mechanism.adaptive import with_bounds
from dpbench.privacy.mechanism.clipping import Groups
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise
from dpbench.privacy.mechanism.plan import ReleasePlan, Statistic
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import CONSTANT, Factors
from dpbench.privacy.sampling import Sampling

_DIGITS = 32  # hexadecimal, of the digest
_FIXED = "correlated noise needs the same sensitivity and noise in each step, but "
_ROUNDING = 1e-9


@dataclass(frozen=True)
class TrainingPlan:
    """All that determines the releases of a training, and their cost.

    Guarantee: release t is the mechanism that `release(t)` describes. Where bounds adapt, they are the only part of a
    release that is not known beforehand; they follow earlier releases, and the cost does not depend on them.

    Attributes:
        recipe: Treatment of the records of a batch.
        sampling: How batches are drawn, at a size factor of 1.
        noise: Noise of all releases.
        groups: Partition of the parameters with the first bounds.
        sizes: Number of coordinates of each parameter.
        metric_sizes: Number of values of each metric that the module offers.
        summands: Units over which the sums go.
        bound_factors: Factors of the groups' bounds, by step; not with an adaptation.
        size_factors: Factors of the expected batch size, by step.
    """

    recipe: Recipe
    sampling: Sampling
    noise: Noise
    groups: Groups
    sizes: tuple[int, ...]
    metric_sizes: Mapping[str, int] = field(default_factory=dict)
    summands: Summands = UNITS
    bound_factors: Factors = CONSTANT
    size_factors: Factors = CONSTANT

    def __post_init__(self) -> None:
        self.noise.check(self)
        if not self.noise.independent and self.recipe.private:
            self._refuse_more_than_one_participation()

    def _refuse_more_than_one_participation(self) -> None:
        """Refuse correlated noise where a record could move its whitened releases by more than the bound."""
        bands = self.noise.bands
        if bands < 2 or math.hypot(*self.noise.whitening or ()) > 1 + _ROUNDING:
            raise ConfigurationError(
                f"{name_of(type(self.noise))} correlates the noise of steps without stating how, so its cost is "
                "unknown: state the coefficients, of norm 1, that make it independent (whitening), or independent = "
                "True if each step draws from its own key alone."
            )
        if self.sampling.cycle < bands:
            self.sampling.in_groups(bands)  # says why not
            raise ConfigurationError(
                f"the batches contain a record at most once in {self.sampling.cycle} steps, but the noise has {bands} "
                "bands: give both the same number."
            )
        if self.recipe.adaptation is not None:
            raise ConfigurationError(
                f"{_FIXED}the bounds adapt: use a strategy with fixed bounds (dpsgd), or strategy.noise=gaussian."
            )
        if self.bound_factors:
            raise ConfigurationError(f"{_FIXED}the bounds change: leave out max_grad_norm_schedule.")
        if self.size_factors:
            raise ConfigurationError(f"{_FIXED}the batch size changes: leave out expected_batch_size_schedule.")
        if self.summands.per_summand > 1:
            raise ConfigurationError(
                "correlated noise needs records that are clipped one by one, not in microbatches: set "
                "microbatch_size=1."
            )

    def release(self, step: int, bounds: Sequence[float] | None = None) -> ReleasePlan:
        """The plan of a release.

        Args:
            step: Number of the release.
            bounds: Bounds of the groups, if they have adapted; None: the first ones.

        Raises:
            ConfigurationError: A value is out of range, the groups are no partition, or the statistics alone cost more
                than the noise allows.
        """
        groups = self.groups if bounds is None else with_bounds(self.groups, bounds)
        if self.bound_factors:
            factor = self.bound_factors.at(step)
            scaled = [factor * group.max_grad_norm for group in groups]
            groups = with_bounds(groups, scaled)
        return ReleasePlan(
            sampling=self.sampling_of(step),
            groups=groups,
            noise_multiplier=self._noise_multiplier(step),
            sizes=self.sizes,
            statistics=self._statistics(step, groups),
            allocation=self.recipe.allocation,
            summands=self.summands,
        )

    def _noise_multiplier(self, step: int) -> float:
        # Noise that says that it is constant is so: the budget counts its steps as the first one.
        return self.noise.multiplier(0 if self.noise.constant else step)

    def _statistics(self, step: int, groups: Groups) -> tuple[Statistic, ...]:
        """Statistics that are summed with the gradients: first those of the adaptation, then private metrics."""
        multiplier = self._noise_multiplier(step)
        sampling = self.sampling_of(step)
        statistics: list[Statistic] = []
        if self.recipe.adaptation is not None:
            records = self.summands.expected(sampling)
            statistics += self.recipe.adaptation.statistics(groups, records, multiplier)
        if self.recipe.metrics is not None:
            statistics += self.recipe.metrics.statistics(
                self.metric_sizes,
                multiplier,
                sampling,
                self.summands,
            )
        return tuple(statistics)

    def sampling_of(self, step: int) -> Sampling:
        """How the batch of a step is drawn.

        Raises:
            ConfigurationError: Batches cannot have that size.
        """
        return self.sampling.resized(self.size_factors.at(step)).at(step)

    def event(self, step: int) -> Event:
        """Event of a release on a batch of its own."""
        plan = self.release(step)
        return Event(plan.sampling, equivalent_queries(plan.queries))

    @property
    def constant(self) -> bool:
        """Return whether the plan of each release is the same, except for bounds that adapt."""
        is_scheduled = bool(self.bound_factors) or bool(self.size_factors)
        return self.noise.constant and not is_scheduled and self.sampling.cycle == 1

    @cached_property
    def digest(self) -> int:
        """A number for the releases, part of the key of the noise.

        The same unit noise scaled in two ways would reveal the sum. It covers the first bounds and not those that have
        adapted: these differ in the last bit between one process and two, and the ledger refuses a replay with others.
        """
        first = self.release(0)
        content: object = [first, self.noise, self.bound_factors, self.size_factors]
        if self.constant and type(self.noise) is Gaussian:
            content = first  # which says all of the noise
        digits = digest_of(content)[:_DIGITS]
        return int(digits, 16)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data for the header of a ledger: `accounting.stated_plan.StatedPlan` reads it.

        The `recipe`, which costs nothing, is described for readers, by names and options.
        """
        groups = []
        for group in self.groups:
            coordinates = sum(self.sizes[position] for position in group.parameters)
            bound = float(group.max_grad_norm)
            groups.append({"name": group.name, "max_grad_norm": bound, "coordinates": coordinates})
        weight = self.summands.total_weight
        return {
            "digest": f"{self.digest:0{_DIGITS}x}",
            "sampling": self.sampling.to_dict(),
            "size_factors": self.size_factors.to_list(),
            "summands": {
                "unit": self.summands.unit,
                "per_summand": self.summands.per_summand,
                "total_weight": None if weight is None else float(weight),
            },
            "noise": self.noise.to_dict(),
            "groups": groups,
            "bound_factors": self.bound_factors.to_list(),
            "allocation": self.recipe.allocation,
            "statistics": [asdict(statistic) for statistic in self.release(0).statistics],
            "recipe": describe(self.recipe),
        }
