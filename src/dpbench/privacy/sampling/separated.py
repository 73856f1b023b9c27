"""Participations that lie apart, without amplification."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling.full import FullParticipation
from dpbench.privacy.sampling.scheme import Sampling, TakingTurns


@dataclass(frozen=True)
class SeparatedSampling(TakingTurns, Sampling):
    """Each record takes part in each step of its group, at least `min_separation` steps apart.

    As in federated rounds with public cohorts: there is no amplification. A record's group is drawn uniformly
    and independently of all others, once for the whole training (`PrivateBatchSampler` does it). Neighbors differ in
    the presence of one record.

    Guarantee: with noise that is independent, or correlated over at most `min_separation` steps, k participations are
    one Gaussian mechanism of μ = √k / z (Choquette-Choo et al. 2023), and n steps have k = ⌈n / min_separation⌉. The
    first step of a round states the cost of the whole round, one Gaussian, and the others none.

    Attributes:
        min_separation: Steps from one participation of a record to the next; the number of groups.
        max_participations: Largest number of participations of a record; None: limited only by the length of the
            training.
        turn: Group of the step: t mod min_separation.

    >>> cohorts = SeparatedSampling(440, min_separation=10, max_participations=5)
    >>> cohorts.expected_batch_size, cohorts.most_steps
    (44.0, 50)
    """

    min_separation: int
    max_participations: int | None = None
    turn: int = 0

    kind = "min_separation"
    neighboring_relation = "add_or_remove_one"
    record_changes = 1
    whole_lots = False

    def __post_init__(self) -> None:
        if self.population < 1:
            raise ConfigurationError(f"batches need at least one record, not {self.population}.")
        if type(self.min_separation) is not int or not 1 <= self.min_separation <= self.population:
            raise ConfigurationError(
                f"min_separation must be a whole number of steps from 1 to the {self.population} {self.unit}s, not "
                f"{self.min_separation!r}."
            )
        most = self.max_participations
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigurationError(f"max_participations must be a whole number of at least 1, or null, not {most!r}.")
        if type(self.turn) is not int or not 0 <= self.turn < self.min_separation:
            raise ConfigurationError(f"turn must lie from 0 to {self.min_separation - 1}, not {self.turn!r}.")

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        separation = round(1 / rate)
        if abs(separation * rate - 1) > 1e-9:
            below = population / math.ceil(1 / rate)
            above = population / math.floor(1 / rate)
            raise ConfigurationError(
                f"min_separation batches must cover the {population} {unit}s in a whole number of steps: set "
                f"expected_batch_size to {below:.10g} or {above:.10g}, not {rate * population:g}."
            )
        return cls(population, separation, unit=unit)

    def among(self, population: int) -> Self:
        return replace(self, population=population)

    def in_groups(self, groups: int) -> Sampling:
        """Participations have to lie as far apart as noise has bands."""
        if groups > self.min_separation:
            raise ConfigurationError(
                f"the noise has {groups} bands, but {self.unit}s take part again after {self.min_separation} steps: "
                f"lower strategy.bands to {self.min_separation}, or the batch size to {self.population / groups:g}."
            )
        return self

    @property
    def cycle(self) -> int:
        return self.min_separation

    @property
    def group_rate(self) -> float:
        """Every record of a group takes part."""
        return 1.0

    @property
    def most_steps(self) -> float:
        if self.max_participations is None:
            return math.inf
        return self.max_participations * self.min_separation

    @property
    def expected_batch_size(self) -> float:
        return self.population / self.min_separation

    @property
    def round(self) -> Sampling:
        return FullParticipation(self.population, unit=self.unit)
