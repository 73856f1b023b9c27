"""The event that a release is accounted for: noised sums over one batch, and its sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpbench.privacy.sampling import Sampling

METRIC = "metric/"
"""Begins the names of private metrics."""
EARLIER = "earlier/"
"""Begins the names of queries that were answered on the same batch by an earlier phase of the run."""
MICROBATCH = "microbatch"
"""Unit of queries that sum over microbatches."""
NOISE_END = 11.53
"""Standard deviations that the noise of this version ends beyond, in every tier: a radius takes 96 bits or more."""


def record_changes(sampling: Sampling, microbatch_size: int = 1) -> int:
    """Count the bounds by which a clipped sum moves between neighbors that differ in one example.

    1 if an example is added or removed, 2 if it is replaced. An example that joins or leaves a microbatch turns that
    microbatch's clipped gradient from any vector within the bound into any other, which is 2 as well; where another one
    makes room for it, two microbatches change.

    >>> from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling
    >>> record_changes(PoissonSampling(1000, 0.05)), record_changes(PoissonSampling(1000, 0.05), microbatch_size=4)
    (1, 2)
    >>> record_changes(FixedSizeSampling(1000, 50))
    2
    """
    if microbatch_size > 1:
        return 2 * sampling.records_affected
    return sampling.record_changes


@dataclass(frozen=True)
class Summands:
    """Vectors that the sums of a release are over, as the source of records describes them.

    Attributes:
        unit: Name of one summand, such as "microbatch"; "" where it is the unit of the sampling.
        per_summand: Units of the sampling that go into one summand: μ, the size of a microbatch.
        total_weight: W, public: total weight of the whole population's summands, if they are weighted; None: each
            weighs 1.
    """

    unit: str = ""
    per_summand: int = 1
    total_weight: float | None = None

    def __post_init__(self) -> None:
        if type(self.per_summand) is not int or self.per_summand < 1:
            raise ValueError(f"per_summand must be a whole number of at least 1, not {self.per_summand!r}")
        if self.total_weight is not None and not 0 < self.total_weight < math.inf:
            raise ValueError(f"total_weight must be a positive number, not {self.total_weight!r}")
        if (self.per_summand > 1) != bool(self.unit):
            raise ValueError("summands need a unit exactly if per_summand is above 1")

    def changes(self, sampling: Sampling) -> int:
        """Count the bounds by which a clipped sum moves between neighbors that differ in one unit of the sampling."""
        return record_changes(sampling, self.per_summand)

    def expected(self, sampling: Sampling) -> float:
        """Expected number of summands in a batch."""
        return sampling.expected_batch_size / self.per_summand

    def denominator(self, sampling: Sampling) -> float:
        """q·W, the expected weight of a batch, which divides a released sum (general_approach_2018, 2.1)."""
        if self.total_weight is None:
            return self.expected(sampling)
        rate = sampling.expected_batch_size / sampling.population
        return rate * self.total_weight


UNITS = Summands()
"""Each summand is one unit of the sampling."""


class SumQuery(NamedTuple):
    """A noised sum over the records of a batch, as the ledger records it (a tuple: ledgers hold hundreds of thousands).

    Attributes:
        name: Name of the vector.
        sensitivity: Most that the sum moves in l2 norm between neighbors.
        noise_std: Standard deviation of the Gaussian noise on each coordinate.
        unit: Unit of the summands, if it is not that of the sampling: "microbatch" for sums over microbatches.
    """

    name: str
    sensitivity: float
    noise_std: float
    unit: str = ""


Queries = tuple[SumQuery, ...]
"""Queries of one release, which all read the same batch."""


class Event(NamedTuple):
    """A release as accountants see it: two of equal events cost the same.

    Attributes:
        sampling: How the batch was drawn.
        queries: All read the same batch.
    """

    sampling: Sampling
    queries: Queries


def effective_noise_multiplier(queries: Sequence[SumQuery]) -> float:
    """Z = (Σ_g (S_g/σ_g)²)^(-1/2): the single Gaussian query that costs the same (general_approach_2018, 2.2).

    >>> effective_noise_multiplier([SumQuery("weights", 0.6, 1.5), SumQuery("biases", 0.8, 1.5)])
    1.5
    """
    costs = [(query.sensitivity / query.noise_std) ** 2 for query in queries]
    return 1 / math.sqrt(sum(costs))


def equivalent_queries(queries: Sequence[SumQuery]) -> Queries:
    """One query of sensitivity 1 that costs as much (to ten digits, rounded to the costly side).

    Releases with bounds that adapt differ in every query and cost the same: so they can be counted together.

    >>> equivalent_queries([SumQuery("all", 0.1, 0.3)]) == equivalent_queries([SumQuery("all", 0.7, 2.1)])
    True
    """
    z = effective_noise_multiplier(queries)
    decimals = 9 - math.floor(math.log10(z))
    # Less noise costs more: z is rounded down. Where it is a number of ten digits already, a rounding error just below
    # it must not take a whole unit away.
    units = math.floor(z * 10.0**decimals * (1 + 1e-14))
    return (SumQuery("equivalent", 1.0, units / 10.0**decimals),)
