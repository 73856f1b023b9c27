"""What an auditor decides before looking: how many guesses, and where the threshold lies, from the claim alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from dpbench.auditing.one_run import Guesses
from dpbench.privacy.canaries.scores import Floats, log_likelihood_ratio
from dpbench.privacy.events import Event, effective_noise_multiplier

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
_SHARES = np.array([0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5])


class ExpectedScores(NamedTuple):
    """Mean and standard deviation of a claimed mechanism's summed log-likelihood ratios.

    Attributes:
        mean_in, std_in: Of members.
        mean_out, std_out: Of others.
    """

    mean_in: float
    std_in: float
    mean_out: float
    std_out: float

    def above(self, thresholds: Floats) -> tuple[Floats, Floats]:
        """Share of members, and of others, above thresholds, if scores were Gaussian."""
        return (
            stats.norm.sf((thresholds - self.mean_in) / self.std_in),
            stats.norm.sf((thresholds - self.mean_out) / self.std_out),
        )

    @property
    def thresholds(self) -> Floats:
        """A grid over all scores that are to be expected."""
        low = min(self.mean_in - 5 * self.std_in, self.mean_out - 5 * self.std_out)
        high = max(self.mean_in + 5 * self.std_in, self.mean_out + 5 * self.std_out)
        return np.linspace(low, high, 1001)


def expected_scores(events: Mapping[Event, int], replace_one: bool = False, reach: float = 1.0) -> ExpectedScores:
    """Moments of the scores under the claim, by Gauss-Hermite quadrature for each distinct release.

    Args:
        events: How often each release was made.
        replace_one: As for `log_likelihood_ratio`.
        reach: As for `log_likelihood_ratio`.
    """
    moments = np.zeros(4)
    for (sampling, queries), count in events.items():
        z, q = effective_noise_multiplier(queries), min(1.0, sampling.rate)

        def mean_of(values: Floats) -> float:
            return float(_WEIGHTS @ values / _WEIGHTS.sum())

        def of_a_member(move: float, z: float = z, q: float = q, count: int = count) -> tuple[float, float]:
            kept, moved = (log_likelihood_ratio(z * _NODES + to, z, q, replace_one, reach) for to in (0.0, move))
            mean = (1 - q) * mean_of(kept) + q * mean_of(moved)
            square = (1 - q) * mean_of(kept**2) + q * mean_of(moved**2)
            return count * mean, count * max(square - mean**2, 0.0)

        moves = (reach / 2, -reach / 2) if replace_one else (reach, 0.0)
        moments += [*of_a_member(moves[0]), *of_a_member(moves[1])]
    least = 1e-12  # of a deviation
    return ExpectedScores(moments[0], max(moments[1] ** 0.5, least), moments[2], max(moments[3] ** 0.5, least))


def choose_guesses(canaries: int, expected: ExpectedScores, level: float) -> Guesses:
    """How many guesses to make for the best bound from one run, if the claim is true.

    Any choice is valid that does not depend on what is seen; this one maximizes the lower limit of the log-odds of a
    right guess.

    Args:
        canaries: m.
        expected: What the claim lets expect.
        level: Of the bound.
    """
    inside, outside = expected.above(expected.thresholds)
    shares = (inside + outside) / 2  # decreasing
    numbers = np.unique(np.round(_SHARES * canaries).astype(int))
    top = np.interp(numbers / canaries, shares[::-1], inside[::-1]) * canaries / 2
    low = np.interp(1 - numbers / canaries, shares[::-1], 1 - outside[::-1]) * canaries / 2
    made, right = numbers[:, None] + numbers, top[:, None] + low
    usable = (made > 0) & (made <= canaries)
    wrong = np.maximum(made - right, 0)
    limits = np.where(usable, stats.beta.ppf(level, np.maximum(right, 1e-9), wrong + 1), 0.0)
    best = np.unravel_index(int(limits.argmax()), limits.shape)
    return Guesses(int(numbers[best[0]]), int(numbers[best[1]]))


def choose_threshold(canaries: int, expected: ExpectedScores, delta: float, level: float) -> float:
    """The threshold for the best bound from two error rates, if the claim is true; see `two_rates`.

    Args:
        canaries: m.
        expected: What the claim lets expect.
        delta: δ.
        level: Of the bound.
    """
    thresholds, half = expected.thresholds, canaries / 2
    inside, outside = expected.above(thresholds)
    fpr = special.betaincinv(half * outside + 1, half * (1 - outside) + 1e-9, 1 - level / 2)
    fnr = special.betaincinv(half * (1 - inside) + 1, half * inside + 1e-9, 1 - level / 2)
    with np.errstate(divide="ignore"):
        limits = [np.log(np.maximum(1 - b - delta, 0) / a) for a, b in ((fpr, fnr), (fnr, fpr))]
    return float(thresholds[int(np.max(limits, axis=0).argmax())])
