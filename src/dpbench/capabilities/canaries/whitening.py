"""Canaries in correlated noise: whitened releases, and the participations in them.

With noise n = C⁻¹w, C lower triangular, banded and Toeplitz, an auditor looks at C·(releases): there the noise is w,
independent from step to step, and a record that takes part in step t moves b steps by c_0 x, ..., c_{b−1} x. Projected
on c, which has norm 1, these b steps are one observation with the declared sensitivity and noise. A record takes part
once in b steps at most, so that its observations share no step and are as independent as those of Poisson batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from dpbench.capabilities.canaries.arrays import CountArray, FlagArray, FloatArray, Sums

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class RoundSums(Sums):
    """Sums over the rounds of an audited run, in which each canary may take part once.

    Attributes:
        length: Number of steps in a round, and of groups.
        complete: Number of rounds that were seen to the end of their noise, which is in the next one.
        members: Number of canaries among the records, by group.
    """

    length: NonNegativeInt
    complete: NonNegativeInt
    members: list[NonNegativeInt]

    @property
    def fewest_releases(self) -> int:
        """Number of releases by which one round is complete."""
        return 2 * self.length - 1


class Rounds(Sums):
    """Makes one observation of each canary and round.

    Attributes:
        coefficients: c_0 to c_{b−1} of the declared noise, of norm 1; [1] is independent noise.
        length: Number of steps in a round, b at least: a record's participations lie at least as far apart.
        group: (m,) of each canary: its turn in a round. That of one that is not among the records is a fair draw.
        steps: Number of steps so far.
        observed, residual, statistics: Values of the last b − 1 steps, the last one first.
        current, current_drawn: (m,) of the round that each canary is in: its observation so far, and whether it was
            drawn.
        last, last_drawn: (m,) the same of the last round that it has behind it.
    """

    coefficients: list[float]
    length: int
    group: CountArray
    steps: int = 0
    observed: list[FloatArray] = Field(default_factory=list)
    residual: list[FloatArray] = Field(default_factory=list)
    statistics: list[FloatArray] = Field(default_factory=list)
    current: FloatArray
    current_drawn: FlagArray
    last: FloatArray
    last_drawn: FlagArray

    @classmethod
    def beginning(cls, coefficients: Sequence[float], length: int, group: NDArray[np.int64]) -> Rounds:
        """The rounds of a training before its first step; see the attributes."""
        nothing = np.zeros(len(group))
        nobody = np.zeros(len(group), dtype=np.bool_)
        return cls(
            coefficients=list(coefficients),
            length=length,
            group=group,
            current=nothing,
            current_drawn=nobody,
            last=nothing,
            last_drawn=nobody,
        )

    @property
    def complete(self) -> int:
        """Number of rounds that all canaries have behind them."""
        return max(0, (self.steps + 1) // self.length - 1)

    def _whiten(self, earlier: list[Floats], values: Floats) -> Floats:
        """Go on by one step of Σ_k c_k x_{t−k}.

        Args:
            earlier: x of the last b − 1 steps, the last one first; this step joins them.
            values: x_t, of one shape in all steps.
        """
        earlier.insert(0, values)
        whitened = np.zeros_like(values)
        # In the first steps there is less to sum.
        for coefficient, step in zip(self.coefficients, earlier, strict=False):
            whitened += coefficient * step
        del earlier[len(self.coefficients) - 1 :]
        return whitened

    def whiten_residual(self, residual: Floats) -> Floats:
        """Whiten the residuals of a step's canaries, shape (m,)."""
        return self._whiten(self.residual, residual)

    def whiten_statistics(self, noise: Floats) -> Floats:
        """Whiten the noise on statistics released with the gradients."""
        return self._whiten(self.statistics, noise)

    def add(self, observed: Floats, drawn: Flags) -> tuple[Floats, Flags] | None:
        """Add one step.

        Args:
            observed: (m,) observation of each canary.
            drawn: (m,) whether it was in the batch.

        Returns:
            Observations (m,) of a round, one of each canary, and the mask of those drawn in it, if a round is complete.
        """
        whitened = self._whiten(self.observed, observed)
        place = (self.steps - self.group) % self.length  # steps since the canary's turn
        is_turn = place == 0
        self.current[is_turn] = 0.0
        self.current_drawn[is_turn] = drawn[is_turn]
        weights = np.zeros(self.length)
        weights[: len(self.coefficients)] = self.coefficients
        self.current += weights[place] * whitened
        is_over = place == self.length - 1
        self.last[is_over] = self.current[is_over]
        self.last_drawn[is_over] = self.current_drawn[is_over]
        before = self.complete
        self.steps += 1
        if self.complete == before:
            return None
        return self.last.copy(), self.last_drawn.copy()

    def sums(self, member: Flags) -> RoundSums:
        """The sums so far.

        Args:
            member: (m,) whether each canary is among the records.
        """
        members = np.bincount(self.group[member], minlength=self.length)
        return RoundSums(
            length=self.length,
            complete=self.complete,
            members=members.tolist(),
        )
