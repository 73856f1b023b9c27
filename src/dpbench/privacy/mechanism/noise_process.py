"""Noise of a training as a process: its scale at each step, its correlation, and its statement in the ledger.

A release uses only this interface, so that another process (such as correlated noise) is another class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpbench.canonical import name_of
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.privacy.sampling import Sampling

Keys = Callable[[int], Sequence[int]]
"""Step → key of its random numbers, for one use of them."""


class Noise(ABC):
    """Noise of all steps of a training.

    A subclass that overrides `multiplier` is not `constant`, and one that overrides `add_` not `independent`, whatever
    the class that it is derived from says of its own, unless it says so itself.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for statement, method in (("constant", "multiplier"), ("independent", "add_")):
            nearest = next(base for base in cls.__mro__ if vars(base).keys() & {statement, method})
            if statement not in vars(nearest):
                setattr(cls, statement, False)

    @abstractmethod
    def multiplier(self, step: int) -> float:
        """Z of a step, in units of the sensitivity of the whole release: its cost follows from it alone."""

    def init(self, size: int) -> Any:
        """State that `add_` keeps from step to step, for a flat sum of `size` numbers; None: none.

        A resumed run makes it again from the keys, so that checkpoints hold no noise.
        """
        return None

    def add_(
        self,
        total: Tensor,
        plan: ReleasePlan,
        step: int,
        keys: Keys,
        state: Any,
    ) -> Tensor:
        """Add the noise of a step to a flat sum, in place: independent of that of all others unless stated otherwise.

        Args:
            total: Flat sum over all records (parameters, then statistics), shape (D,).
            plan: Plan of the release; its `segments` are the standard deviations along the sum.
            step: Number of the release.
            keys: Keys of the random numbers; each step uses its own once.
            state: State from `init`.

        Returns:
            `total`.
        """
        return add_gaussian_noise(total, plan.segments, keys(step))

    def relative_std(self, step: int) -> float:
        """Standard deviation of the noise that `add_` adds at a step, over that of the plan's segments.

        Error correction and optimizers know of it; privacy does not depend on it.
        """
        return 1.0

    @property
    def is_plain(self) -> bool:
        """True if `add_` is `add_gaussian_noise` with the key of the step."""
        return type(self).add_ is Noise.add_

    @property
    def constant(self) -> bool:
        """True if the multiplier is the same at each step; else it is requested at each."""
        return False

    @property
    def independent(self) -> bool:
        """True if the noise of steps is independent; else no batch can be released again."""
        return True

    @property
    def whitening(self) -> tuple[float, ...] | None:
        """c_0 to c_{b−1}, of norm 1, that make Σ_k c_k n_{t−k} independent from step to step; None if unknown."""
        return (1.0,) if self.independent else None

    @property
    def bands(self) -> int:
        """Number of steps over which it is correlated: batches hold a record at most once in so many."""
        return len(self.whitening or (1.0,))

    def begin(self, sampling: Sampling, steps: float) -> None:  # noqa: B027 (most processes begin with every training)
        """Refuse a training that the process does not support.

        Args:
            sampling: How batches are drawn.
            steps: Number of steps; infinity if unknown.

        Raises:
            ConfigurationError: The process does not support it; names cause and remedy.
        """

    def check(self, plan: Any) -> None:  # noqa: B027 (most processes go with every plan)
        """Refuse a plan that the process does not support.

        Args:
            plan: `TrainingPlan` of the training.

        Raises:
            ConfigurationError: The process does not support it; names cause and remedy.
        """

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data for the header of a ledger.

        A class outside this module is stated by its qualified name: a reader of the ledger takes the cost of each
        release from its line, and cannot compare it with the plan.
        """
        return {"process": name_of(type(self)), "described": False}


@dataclass(frozen=True)
class Gaussian(Noise):
    """Independent Gaussian noise, the same at each step.

    Attributes:
        noise_multiplier: z.
    """

    noise_multiplier: float

    def multiplier(self, step: int) -> float:
        """Z."""
        return self.noise_multiplier

    @property
    def constant(self) -> bool:
        """Always."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """The multiplier.

        A subclass may add other noise, and is stated by its qualified name.
        """
        if type(self) is not Gaussian:
            return super().to_dict()
        return {"process": "gaussian", "noise_multiplier": float(self.noise_multiplier)}


@dataclass(frozen=True)
class Scheduled(Noise):
    """Independent Gaussian noise with a multiplier that follows a schedule fixed before training.

    Guarantee: the composition of Gaussian mechanisms with multipliers z·f_t, each in the ledger.

    Attributes:
        noise_multiplier: z.
        factors: f_t.
    """

    noise_multiplier: float
    factors: Factors

    def multiplier(self, step: int) -> float:
        """z·f_t."""
        return self.noise_multiplier * self.factors.at(step)

    @property
    def constant(self) -> bool:
        """True if there are no factors."""
        return not self.factors

    def to_dict(self) -> dict[str, Any]:
        """The multiplier and its factors; a subclass is stated by its name, as for `Gaussian`."""
        if type(self) is not Scheduled:
            return super().to_dict()
        return {
            "process": "scheduled",
            "noise_multiplier": float(self.noise_multiplier),
            "factors": self.factors.to_list(),
        }


MakeNoise = Callable[[float, Factors], Noise]
"""Called with the multiplier z, given or solved for, and its factors by step."""


def noise_of(noise_multiplier: float, factors: Factors) -> Noise:
    """Independent noise, scheduled where there are factors."""
    if factors:
        return Scheduled(noise_multiplier, factors)
    return Gaussian(noise_multiplier)
