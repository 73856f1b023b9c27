"""Epochs in random order, for training without privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling.scheme import Positions, Sampling


@dataclass(frozen=True)
class ShuffledEpochs(Sampling):
    """Every record once per epoch in random order: for non-private runs, no accountant here covers it.

    >>> ShuffledEpochs(10, 4).steps_per_epoch
    3
    """

    batch_size: int

    kind = "shuffled_epochs"
    words = ("shuffled",)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigurationError(f"batch_size must be at least 1, not {self.batch_size}.")

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        batch_size = max(1, round(rate * population))
        return cls(population, batch_size, unit=unit)

    @property
    def expected_batch_size(self) -> float:
        return float(min(self.batch_size, self.population))

    @property
    def steps_per_epoch(self) -> int:
        return max(1, -(-self.population // self.batch_size))

    @property
    def lots_per_draw(self) -> int:
        return self.steps_per_epoch

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        order = rng.permutation(self.population)
        size = self.batch_size
        return tuple(order[lot * size : (lot + 1) * size] for lot in range(self.steps_per_epoch))
