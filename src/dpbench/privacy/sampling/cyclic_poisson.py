"""Cyclic Poisson sampling: groups of records take turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling.poisson import PoissonSampling
from dpbench.privacy.sampling.scheme import Sampling, TakingTurns


@dataclass(frozen=True)
class CyclicPoissonSampling(TakingTurns, Sampling):
    """Each record is in one of b groups; batch t is a Poisson sample at rate b·q of group t mod b.

    A record's group is drawn uniformly and independently of all others, once for the whole training
    (`PrivateBatchSampler` does it), so that a record takes part at most once in any b consecutive steps, which noise
    that is correlated over b steps needs. Neighbors differ in the presence of one record.

    Guarantee: a round of b steps costs as much as one Poisson batch at rate b·q, as each record is in at most one
    of its batches, so n steps cost ⌈n/b⌉ of them (Choquette-Choo et al. 2023). The first step of a round states that
    cost, the others none.

    Attributes:
        sample_rate: q, the mean over all steps of the probability that a record is in a batch.
        cycle_length: b, the number of groups.
        turn: Group of the step: t mod b.

    >>> sampling = CyclicPoissonSampling(60_000, 1024 / 60_000, cycle_length=8)
    >>> sampling.expected_batch_size, sampling.at(13).turn
    (1024.0, 5)
    """

    sample_rate: float
    cycle_length: int = 1
    turn: int = 0

    kind = "cyclic_poisson"
    neighboring_relation = "add_or_remove_one"
    record_changes = 1
    whole_lots = False

    def __post_init__(self) -> None:
        _ = PoissonSampling(self.population, self.sample_rate)  # refuses values out of range
        if type(self.cycle_length) is not int or self.cycle_length < 1:
            raise ConfigurationError(
                f"cycle_length must be a whole number of steps, at least 1, not {self.cycle_length!r}."
            )
        if type(self.turn) is not int or not 0 <= self.turn < self.cycle_length:
            raise ConfigurationError(f"turn must lie from 0 to {self.cycle_length - 1}, not {self.turn!r}.")
        # A rate of 1 was perhaps computed as a quotient.
        if self.cycle_length * self.sample_rate > 1 + 1e-9:
            raise ConfigurationError(
                f"{self.cycle_length} bands need batches of at most {self.population / self.cycle_length:g} of "
                f"{self.population} {self.unit}s (each band draws from its own group), not "
                f"{self.expected_batch_size:g}: lower strategy.bands or expected_batch_size."
            )

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        return cls(population, rate, unit=unit)

    def among(self, population: int) -> Self:
        rate = self.sample_rate * self.population / population
        return replace(self, population=population, sample_rate=rate)

    def in_groups(self, groups: int) -> Sampling:
        """One group is all records: then batches are Poisson's."""
        if 1 < self.cycle_length < groups:
            raise ConfigurationError(
                f"cycle_length={self.cycle_length} is below the {groups} bands of the noise: set it to at least "
                f"{groups}, or leave it out."
            )
        if self.cycle_length > 1:
            return self
        in_groups = replace(self, cycle_length=groups)  # refuses an invalid number of groups
        if groups == 1:
            return PoissonSampling(self.population, self.sample_rate, unit=self.unit)
        return in_groups

    @property
    def cycle(self) -> int:
        return self.cycle_length

    @property
    def group_rate(self) -> float:
        """b·q: probability of a record to be in a batch of its group."""
        return min(1.0, self.cycle_length * self.sample_rate)

    @property
    def expected_batch_size(self) -> float:
        return self.sample_rate * self.population

    @property
    def round(self) -> Sampling:
        return PoissonSampling(self.population, self.group_rate, unit=self.unit)
