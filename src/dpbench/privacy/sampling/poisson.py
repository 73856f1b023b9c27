"""Poisson sampling, and with a largest batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling.scheme import Part, Positions, Sampling

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Each record is in a batch with probability `sample_rate`, independently of everything else.

    Neighbors differ in the presence of one record; batch sizes are binomial and may be zero.

    >>> PoissonSampling(60_000, 256 / 60_000).expected_batch_size
    256.0
    """

    sample_rate: float

    kind = "poisson"
    neighboring_relation = "add_or_remove_one"
    record_changes = 1
    whole_lots = False
    known_by_rate = True

    def __post_init__(self) -> None:
        if self.population < 1:
            raise ConfigurationError(f"Poisson sampling needs at least one record, not {self.population}.")
        if not 0 < self.sample_rate <= 1:
            raise ConfigurationError(
                f"sample_rate must lie in (0, 1], not {self.sample_rate}; "
                "an expected_batch_size between 1 and the number of training records gives that."
            )

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        return cls(population, rate, unit=unit)

    @property
    def expected_batch_size(self) -> float:
        return self.sample_rate * self.population

    @property
    def lot_size_cumulants(self) -> tuple[float, float]:
        """Those of a binomial number."""
        variance = self.sample_rate * (1 - self.sample_rate)  # of one record's draw
        lot_variance = self.population * variance
        return lot_variance, lot_variance * (1 - 6 * variance)

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        # A binomial size and a uniform subset of that size is Poisson sampling, without a draw for each record.
        size = int(rng.binomial(self.population, self.sample_rate))
        return (rng.choice(self.population, size, replace=False, shuffle=False),)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

        gaussian = GaussianDpEvent(noise_multiplier)
        if self.sample_rate == 1:
            return gaussian
        return PoissonSampledDpEvent(self.sample_rate, gaussian)

    def second_order_divergence(self, noise_multiplier: float) -> float:
        """Exact: log(1 + q²(e^{1/z²} − 1))."""
        rate = self.sample_rate
        exponent = noise_multiplier**-2
        if exponent < 500:
            return math.log1p(rate**2 * math.expm1(exponent))
        return 2 * math.log(rate) + exponent  # the exponential would overflow

    def squared_mu(self, noise_multiplier: float) -> float:
        """q²(e^{1/z²} − 1) (Bu, Dong, Long & Su 2020, theorem 5); exact without sampling, where it is 1/z²."""
        inverse = 1 / noise_multiplier
        if self.rate == 1:
            return inverse**2
        with np.errstate(over="ignore"):
            return self.rate**2 * float(np.expm1(inverse**2))


@dataclass(frozen=True)
class TruncatedPoissonSampling(Sampling):
    """Poisson sampling, and a uniform subset of `max_batch_size` records where a batch would hold more.

    Neighbors differ in the presence of one record, and the population is that of the larger one. Where batches are cut,
    a record takes the place of another one: a clipped sum moves by up to twice the bound (Ganesh 2025, "Tighter Privacy
    Analysis for Truncated Poisson Sampling").

    >>> TruncatedPoissonSampling(1000, 0.05, max_batch_size=50).expected_batch_size < 50
    True
    """

    sample_rate: float
    max_batch_size: int

    kind = "truncated_poisson"
    neighboring_relation = "add_or_remove_one"
    record_changes = 2
    records_affected = 2
    whole_lots = False

    def __post_init__(self) -> None:
        _ = PoissonSampling(self.population, self.sample_rate)  # refuses values out of range
        if type(self.max_batch_size) is not int or self.max_batch_size < 1:
            raise ConfigurationError(
                f"max_batch_size must be a whole number of records, at least 1, not {self.max_batch_size!r}."
            )

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        """Make a scheme of batches of at most six standard deviations above the mean, which costs next to nothing."""
        mean = population * rate
        deviation = math.sqrt(mean * (1 - rate))
        return cls(population, rate, math.ceil(mean + 6 * deviation), unit=unit)

    def among(self, population: int) -> Self:
        """The same largest batch, and the same number of records that are drawn before a batch is cut."""
        rate = min(1.0, self.sample_rate * self.population / population)
        return replace(self, population=population, sample_rate=rate)

    @property
    def expected_batch_size(self) -> float:
        """E min(X, m) = nq·P(X' < m) + m·P(X > m), X and X' binomial of n and n − 1."""
        n = self.population
        q = self.sample_rate
        m = self.max_batch_size
        return n * q * (1 - _more(m - 1, n - 1, q)) + m * _more(m, n, q)

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        drawn = int(rng.binomial(self.population, self.sample_rate))
        size = min(drawn, self.max_batch_size)
        return (rng.choice(self.population, size, replace=False, shuffle=False),)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        from dp_accounting import TruncatedSubsampledGaussianDpEvent

        over_bound = self.record_changes * noise_multiplier
        return TruncatedSubsampledGaussianDpEvent(
            self.population,
            self.sample_rate,
            self.max_batch_size,
            over_bound,
        )

    def mixture(self, noise_multiplier: float) -> Sequence[Part]:
        """Mixture of full and other batches: whether the others fill the batch does not depend on the record.

        Where they do not, it joins with probability q and moves the sum by one bound. Where they do, their part of the
        batch is a uniform subset of m, in which it takes the place of one, by two bounds, with the probability r that
        it is drawn and kept: r = P(X > m)·m/n / P(X' ≥ m).
        """
        n = self.population
        q = self.sample_rate
        m = self.max_batch_size
        full = _more(m - 1, n - 1, q)  # probability that the others fill the batch
        uncut_lot = Part(1 - full, PoissonSampling(n, q), self.record_changes * noise_multiplier)
        if not full:
            return (uncut_lot,)
        r = min(q, _more(m, n, q) * m / n / full) or q  # at most q, also where a probability rounds to zero
        cut_lot = Part(full, PoissonSampling(n, r), noise_multiplier)
        if full < 1:
            return (uncut_lot, cut_lot)
        return (cut_lot,)


def _more(number: int, population: int, rate: float) -> float:
    """P(X > number) for X binomial."""
    from scipy.stats import binom

    return float(binom.sf(number, population, rate))
