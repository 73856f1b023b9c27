"""One frozen object from which noise, divisor and ledger entry of a release are all derived.

So what is accounted for cannot drift from what is done (jax_privacy's `DPExecutionPlan` is the model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.clipping import VectorGroup
from dpbench.privacy.noise import add_gaussian_noise
from dpbench.privacy.sampling import Sampling


@dataclass(frozen=True)
class SumQuery:
    """A noised sum over the records of a lot, as the ledger records it.

    Attributes:
        name: Which vector.
        sensitivity: Most that the sum moves in l2 norm between neighbours.
        noise_std: Standard deviation of the Gaussian noise on each coordinate.
    """

    name: str
    sensitivity: float
    noise_std: float


@dataclass(frozen=True)
class ReleasePlan:
    """How the gradients of one lot become one private gradient.

    Guarantee: each release is the Gaussian mechanism on a sum over the lot; unit of privacy one example, neighbouring
    relation and amplification those of `sampling`, sensitivity Σ over groups as in `queries`.

    Attributes:
        sampling: How lots are drawn.
        groups: Partition of the parameters, each with its bound C_g.
        noise_multiplier: z; the noise has standard deviation z·√(Σ C_g²) on each coordinate.
        sizes: Number of coordinates of each parameter.
    """

    sampling: Sampling
    groups: tuple[VectorGroup, ...]
    noise_multiplier: float
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ConfigurationError(
                f"noise_multiplier must be a positive number, not {self.noise_multiplier}; "
                "use strategy=none for training without privacy."
            )
        covered = sorted(position for group in self.groups for position in group.parameters)
        if covered != list(range(len(self.sizes))):
            raise ConfigurationError("every trainable parameter must belong to exactly one group.")

    @property
    def noise_std(self) -> float:
        """Noise on each coordinate of the sum."""
        return self.noise_multiplier * math.sqrt(sum(group.max_grad_norm**2 for group in self.groups))

    def queries(self) -> tuple[SumQuery, ...]:
        """The release as the ledger records it.

        One record changes the clipped sum of group g by at most C_g when it is added or removed, by 2·C_g when it is
        replaced.
        """
        changes = self.sampling.record_changes
        return tuple(SumQuery(group.name, changes * group.max_grad_norm, self.noise_std) for group in self.groups)

    def privatize(self, total: Tensor, generator: torch.Generator) -> Tensor:
        """Add noise to the flat clipped sum over all records of a lot, once, in place."""
        return add_gaussian_noise(total, [(sum(self.sizes), self.noise_std)], generator)

    def average(self, total: Tensor) -> Tensor:
        """Divide by the *expected* lot size, in place: the realised size is private."""
        return total.div_(self.sampling.expected_batch_size)


def effective_noise_multiplier(queries: Sequence[SumQuery]) -> float:
    """Z = (Σ_g (S_g/σ_g)²)^(-1/2): the single Gaussian query that costs the same (general_approach_2018, 2.2)."""
    return 1 / math.sqrt(sum((query.sensitivity / query.noise_std) ** 2 for query in queries))
