"""Canaries in correlated noise: whitened releases, and what a participation is in them.

With noise n = C⁻¹w, C lower triangular, banded and Toeplitz, an auditor looks at C·(releases): there the noise is w,
independent from step to step, and a record that takes part in step t moves b steps by c_0 x, ..., c_{b−1} x. Projected
on c, which has norm 1, these b steps are one observation with the declared sensitivity and noise. A record takes part
once in b steps at most, so that its observations share no step and are as independent as those of Poisson lots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class RoundSums:
    """What is known of the rounds of an audited run, in which each canary may take part once.

    Attributes:
        length: Number of steps in a round, and of groups.
        complete: Number of rounds that were seen to the end of their noise, which is in the next one.
        out_of_turn: How often a canary was drawn in a step that is not of its group.
        members: Number of canaries among the records, by group.
    """

    length: int
    complete: int
    out_of_turn: int
    members: tuple[int, ...]

    @property
    def fewest_releases(self) -> int:
        """Number of releases by which one round is complete."""
        return 2 * self.length - 1

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "length": self.length,
            "complete": self.complete,
            "out_of_turn": self.out_of_turn,
            "members": list(self.members),
        }

    @classmethod
    def from_json(cls, data: object) -> RoundSums:
        """Inverse of `to_json`.

        Raises:
            ValueError: It is something else.
        """
        names = {"length", "complete", "out_of_turn", "members"}
        if not isinstance(data, Mapping) or set(data) != names:
            raise ValueError(f"rounds should have the keys {', '.join(sorted(names))}")
        members = data["members"]
        if not isinstance(members, list):
            raise ValueError("rounds.members is no list")
        counts = [data["length"], data["complete"], data["out_of_turn"], *members]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("rounds holds something else than whole numbers")
        if len(members) != data["length"]:
            raise ValueError("rounds.members is not one number for each step of a round")
        return cls(
            length=data["length"],
            complete=data["complete"],
            out_of_turn=data["out_of_turn"],
            members=tuple(members),
        )


class Whitening:
    """C times what comes step by step: Σ_k c_k x_{t−k}.

    Args:
        coefficients: c_0 to c_{b−1}.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._coefficients = tuple(coefficients)
        self.earlier: list[Floats] = []  # of the last b − 1 steps, the last one first

    def add(self, values: Floats) -> Floats:
        """Go on by one step.

        Args:
            values: x_t, of one shape in all steps.
        """
        steps = [values, *self.earlier]
        whitened = np.zeros_like(values)
        # In the first steps there is less to sum.
        for coefficient, step in zip(self._coefficients, steps, strict=False):
            whitened += coefficient * step
        self.earlier = steps[: len(self._coefficients) - 1]
        return whitened


class Rounds:
    """Makes one observation of each canary and round.

    Args:
        coefficients: c_0 to c_{b−1} of the declared noise, of norm 1; (1,) is independent noise.
        length: Number of steps in a round, b at least: a record's participations lie at least as far apart.
        group: (m,) of each canary: its turn in a round. That of one that is not among the records is a fair draw.
    """

    def __init__(
        self,
        coefficients: Sequence[float],
        length: int,
        group: NDArray[np.int64],
    ) -> None:
        if not 1 <= len(coefficients) <= length:
            raise ValueError(f"{len(coefficients)} bands do not fit into rounds of {length} steps")
        self.coefficients = tuple(coefficients)
        self.length = length
        self.group = np.array(group, dtype=np.int64)
        self.steps = 0
        self.out_of_turn = 0
        self._observed = Whitening(self.coefficients)
        self._residual = Whitening(self.coefficients)
        self._statistics = Whitening(self.coefficients)
        # Of the round that each canary is in, and of the last one that it has behind it.
        canaries = len(self.group)
        self._current = np.zeros(canaries)
        self._current_drawn = np.zeros(canaries, dtype=np.bool_)
        self._last = np.zeros(canaries)
        self._last_drawn = np.zeros(canaries, dtype=np.bool_)

    @property
    def complete(self) -> int:
        """Number of rounds that all canaries have behind them."""
        return max(0, (self.steps + 1) // self.length - 1)

    def whiten_residual(self, residual: Floats) -> Floats:
        """Whiten what a step showed of canaries beyond what they had added, shape (m,)."""
        return self._residual.add(residual)

    def whiten_statistics(self, noise: Floats) -> Floats:
        """Whiten the noise on what is released beside the gradients."""
        return self._statistics.add(noise)

    def add(self, observed: Floats, drawn: Flags) -> tuple[Floats, Flags] | None:
        """Add one step.

        Args:
            observed: (m,) what was seen of each canary.
            drawn: (m,) whether it was in the lot.

        Returns:
            Observations (m,) of a round, one of each canary, and who was drawn in it, where a round is complete.
        """
        whitened = self._observed.add(observed)
        place = (self.steps - self.group) % self.length  # steps since the canary's turn
        is_turn = place == 0
        self.out_of_turn += int((drawn & ~is_turn).sum())
        self._current[is_turn] = 0.0
        self._current_drawn[is_turn] = drawn[is_turn]
        weights = np.zeros(self.length)
        weights[: len(self.coefficients)] = self.coefficients
        self._current += weights[place] * whitened
        is_over = place == self.length - 1
        self._last[is_over] = self._current[is_over]
        self._last_drawn[is_over] = self._current_drawn[is_over]
        before = self.complete
        self.steps += 1
        if self.complete == before:
            return None
        return self._last.copy(), self._last_drawn.copy()

    def sums(self, member: Flags) -> RoundSums:
        """What is known so far.

        Args:
            member: (m,) whether each canary is among the records.
        """
        members = np.bincount(self.group[member], minlength=self.length)
        return RoundSums(
            length=self.length,
            complete=self.complete,
            out_of_turn=self.out_of_turn,
            members=tuple(members.tolist()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Lists and numbers, of which `of` makes the same rounds, bit-identically."""
        return {
            "coefficients": list(self.coefficients),
            "length": self.length,
            "group": self.group.tolist(),
            "steps": self.steps,
            "out_of_turn": self.out_of_turn,
            "observed": _lists(self._observed),
            "residual": _lists(self._residual),
            "statistics": _lists(self._statistics),
            "current": self._current.tolist(),
            "current_drawn": self._current_drawn.tolist(),
            "last": self._last.tolist(),
            "last_drawn": self._last_drawn.tolist(),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Rounds:
        """The rounds whose `state_dict` was kept."""
        rounds = cls(state["coefficients"], state["length"], np.array(state["group"]))
        rounds.steps = int(state["steps"])
        rounds.out_of_turn = int(state["out_of_turn"])
        for name in ("observed", "residual", "statistics"):
            whitening: Whitening = getattr(rounds, f"_{name}")
            whitening.earlier = [np.array(values, dtype=np.float64) for values in state[name]]
        rounds._current = np.array(state["current"], dtype=np.float64)
        rounds._current_drawn = np.array(state["current_drawn"], dtype=np.bool_)
        rounds._last = np.array(state["last"], dtype=np.float64)
        rounds._last_drawn = np.array(state["last_drawn"], dtype=np.bool_)
        return rounds


def _lists(whitening: Whitening) -> list[list[float]]:
    return [values.tolist() for values in whitening.earlier]
