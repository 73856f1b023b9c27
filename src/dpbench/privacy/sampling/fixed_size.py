"""Batches of a fixed size, each drawn afresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling.scheme import Positions, Sampling

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class FixedSizeSampling(Sampling):
    """A uniformly random subset of exactly `batch_size` records, drawn afresh for each batch.

    Neighbors differ in the *value* of one record (the size is fixed, so none can be added), hence a clipped
    sum moves by up to twice the clipping bound.

    >>> FixedSizeSampling(1000, 50).rate
    0.05
    """

    batch_size: int

    kind = "fixed_size"
    words = ("fixed_size", "fixed")
    neighboring_relation = "replace_one"
    record_changes = 2
    known_by_rate = True
    without_replacement = True

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.population or self.batch_size != int(self.batch_size):
            raise ConfigurationError(
                f"batch_size must lie between 1 and the {self.population} training records, not {self.batch_size}."
            )

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        batch_size = max(1, round(rate * population))
        return cls(population, batch_size, unit=unit)

    @property
    def expected_batch_size(self) -> float:
        return float(self.batch_size)

    @property
    def lot_size_cumulants(self) -> tuple[float, float]:
        """A batch has no other size."""
        return 0.0, 0.0

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        return (rng.choice(self.population, self.batch_size, replace=False, shuffle=False),)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent

        gaussian = GaussianDpEvent(noise_multiplier)
        return SampledWithoutReplacementDpEvent(self.population, self.batch_size, gaussian)

    def squared_mu(self, noise_multiplier: float) -> float:
        """2q²(e^{1/z²}Φ(3/(2z)) + 3Φ(−1/(2z)) − 2) (Dong, Roth & Su 2022, corollary 5.4); 1/z² without sampling."""
        from scipy import special

        inverse = 1 / noise_multiplier
        if self.rate == 1:
            return inverse**2
        if inverse < 1e-4:  # the terms below cancel to x²/2 + O(x³)
            return (self.rate * inverse) ** 2
        with np.errstate(over="ignore"):
            upper = special.ndtr(1.5 * inverse) * np.exp(inverse**2)
            tails = upper + 3 * special.ndtr(-0.5 * inverse) - 2
        return 2 * self.rate**2 * float(tails)
