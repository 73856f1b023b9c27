"""All records in every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from dpbench.privacy.sampling.scheme import Positions, Sampling

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class FullParticipation(Sampling):
    """Each batch holds all records, such as all hospitals of a study in every round: nothing is amplified.

    Neighbors differ in the presence of one record, hence a clipped sum moves by up to one bound. (The number of all
    records is treated as public, as every population is.)

    >>> FullParticipation(20).expected_batch_size
    20.0
    """

    kind = "full"
    words = ("full",)
    neighboring_relation = "add_or_remove_one"
    record_changes = 1
    everybody = True

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        return cls(population, unit=unit)

    @property
    def expected_batch_size(self) -> float:
        return float(self.population)

    @property
    def lot_size_cumulants(self) -> tuple[float, float]:
        """A batch has no other size."""
        return 0.0, 0.0

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        return (np.arange(self.population),)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        from dp_accounting import GaussianDpEvent

        return GaussianDpEvent(noise_multiplier)

    def squared_mu(self, noise_multiplier: float) -> float:
        """1/z²: exact, without sampling."""
        inverse = 1 / noise_multiplier
        return inverse**2
