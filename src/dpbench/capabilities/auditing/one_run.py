"""Lower bounds from guesses about the canaries of one run, which may depend on each other in any way."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from dpbench.capabilities.auditing.levels import check_delta, check_level
from dpbench.capabilities.canaries.scores import Flags, Floats

MOST_EPSILON = 256.0  # up to which bounds are looked for
_TOLERANCE = 1e-3


class Guesses(NamedTuple):
    """How many guesses are made: to be chosen before anything is looked at.

    Attributes:
        members: Canaries of the highest scores, guessed to be members.
        others: Canaries of the lowest scores, guessed to be none.
    """

    members: int
    others: int

    @property
    def made(self) -> int:
        """Number of guesses, r."""
        return self.members + self.others


def choose_guesses(candidates: int) -> Guesses:
    """How many guesses are made: the 2.5 % of the highest scores, and of the lowest; at least 32 each.

    A function of the number of candidates alone, as the tests want it: see `one_run_p_value`.

    Args:
        candidates: Number of canaries, or of records that may be members.

    >>> choose_guesses(60000)
    Guesses(members=1500, others=1500)
    """
    each = min(max(round(candidates / 40), 32), candidates // 2)
    return Guesses(each, each)


def count_right(scores: Floats, member: Flags, guesses: Guesses) -> int:
    """Count the guesses that are right, v.

    Args:
        scores: (m,) higher for likelier members.
        member: (m,) the truth.
        guesses: Number of guesses, at most m.

    >>> count_right(np.array([3.0, 1.0, 2.0, 0.0]), np.array([True, True, False, False]), Guesses(2, 1))
    2
    """
    order = np.argsort(-scores, kind="stable")
    highest = order[: guesses.members]
    lowest = order[len(order) - guesses.others :]
    return int(member[highest].sum() + (~member[lowest]).sum())


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound P[at least v of r guesses are right] for any (ε, δ)-DP algorithm (Steinke, Nasr & Jagielski 2023).

    β + 2mδ·max_i (P[v−i ≤ Bin(r, p) < v])/i with p = e^ε/(1+e^ε), β = P[Bin(r, p) ≥ v] (Theorem 5.2, appendix D).

    Assumes: each canary is a member by a fair coin of its own; r was chosen without looking. The guesses may depend on
    each other, and the algorithm is any.

    Args:
        canaries: m.
        guesses: r.
        right: v.
        epsilon: ε.
        delta: δ.

    Raises:
        ConfigurationError: δ is out of range.

    >>> round(one_run_p_value(1000, 100, 90, epsilon=1.0, delta=1e-5), 4)
    0.0008
    """
    check_delta(delta)
    p = special.expit(epsilon)
    beta = float(stats.binom.sf(right - 1, guesses, p))
    if delta == 0 or right == 0:
        return beta
    i = np.arange(1, right + 1)
    worst = np.max((stats.binom.sf(right - i - 1, guesses, p) - beta) / i)
    return min(1.0, beta + 2 * canaries * delta * float(worst))


def one_run(canaries: int, guesses: int, right: int, delta: float, level: float) -> float:
    """Lower limit of ε from one run, with nothing assumed but (ε, δ)-DP: see `one_run_p_value`.

    Args:
        canaries: m.
        guesses: r.
        right: v.
        delta: δ.
        level: Probability of a limit above the truth.

    Returns:
        The largest ε that is refuted, to three digits after the point; 0 if none is.

    Raises:
        ConfigurationError: δ or the level is out of range.

    >>> round(one_run(canaries=1000, guesses=100, right=90, delta=1e-5, level=0.05), 2)
    1.63
    """
    check_level(level)
    return largest_refuted(lambda epsilon: one_run_p_value(canaries, guesses, right, epsilon, delta) < level)


def largest_refuted(refuted: Callable[[float], bool]) -> float:
    """Largest ε that a test refutes, where it refutes all smaller ones too; at most 256, 0 if it refutes none.

    Args:
        refuted: Function that returns whether the test refutes an ε.
    """
    steps = range(round(MOST_EPSILON / _TOLERANCE) + 1)
    first_possible = bisect_left(steps, True, key=lambda step: not refuted(step * _TOLERANCE))
    return max(0, first_possible - 1) * _TOLERANCE


def one_run_fdp(canaries: int, guesses: int, right: int, trade_off: Callable[[float], float], level: float) -> bool:
    """Return whether as many right guesses refute f-DP (Mahloujifar, Melis & Chaudhuri 2025, with abstention).

    From R = level·v/m and H = level·(r−v)/m of right and wrong guesses: for i = v−1, …, 0 the wrong ones are at least
    H' = max(H, f̄⁻¹(R)), and R grows by i/(r−i)·(H'−H); refuted if R + H exceeds r/m in the end. Here f̄ = 1 − f, and
    its inverse is f(1−x) for a symmetric f.

    Assumes: fair coins and a number of guesses as for `one_run_p_value`, and that the run is f-DP; nothing on how
    canaries depend on each other.

    Args:
        canaries: m.
        guesses: r.
        right: v.
        trade_off: Symmetric f: least error of the second kind at an error of the first kind.
        level: Probability of refuting a true claim.

    Raises:
        ConfigurationError: The level is out of range.
    """
    check_level(level)
    r = guesses
    hits = level * right / canaries
    errors = level * (r - right) / canaries
    for i in range(right - 1, -1, -1):
        # f̄⁻¹(R) = f(1 − R) for a symmetric f.
        increase = trade_off(1 - hits) - errors
        if increase <= 0:
            break  # the errors suffice here, and R does not grow any more
        hits = min(1.0, hits + i / (r - i) * increase)
        errors += increase
    return hits + errors > r / canaries
