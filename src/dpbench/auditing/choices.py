"""What an auditor decides before looking: how many guesses, and where the threshold lies, from the claim alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from dpbench.auditing.one_run import Guesses
from dpbench.privacy.canaries.scores import Floats, log_likelihood_ratio
from dpbench.privacy.events import Event, effective_noise_multiplier

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(60)  # of Gauss-Hermite quadrature
_LEAST_DEVIATION = 1e-12  # of scores
_SHARES = np.array([0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5])
"""Of the canaries, on which guesses of one kind may be made."""


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
        inside = stats.norm.sf((thresholds - self.mean_in) / self.std_in)
        outside = stats.norm.sf((thresholds - self.mean_out) / self.std_out)
        return inside, outside

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
    move_in, move_out = (reach / 2, -reach / 2) if replace_one else (reach, 0.0)
    mean_in = variance_in = mean_out = variance_out = 0.0
    for (sampling, queries), count in events.items():
        z = effective_noise_multiplier(queries)
        q = min(1.0, sampling.rate)
        ratio = partial(log_likelihood_ratio, noise_multiplier=z, sample_rate=q, replace_one=replace_one, reach=reach)
        mean, variance = _moments(ratio, move_in, z, q)
        mean_in += count * mean
        variance_in += count * variance
        mean, variance = _moments(ratio, move_out, z, q)
        mean_out += count * mean
        variance_out += count * variance
    return ExpectedScores(
        mean_in,
        max(variance_in**0.5, _LEAST_DEVIATION),
        mean_out,
        max(variance_out**0.5, _LEAST_DEVIATION),
    )


def _moments(ratio: Callable[[Floats], Floats], move: float, z: float, q: float) -> tuple[float, float]:
    """Mean and variance of the log-likelihood ratio of one release.

    Args:
        ratio: Of observations.
        move: By how much the canary moves the sum where it is drawn.
        z: Noise multiplier.
        q: Rate at which it is drawn.
    """
    not_drawn = ratio(z * _NODES + 0.0)
    drawn = ratio(z * _NODES + move)
    mean = (1 - q) * _expectation(not_drawn) + q * _expectation(drawn)
    square = (1 - q) * _expectation(not_drawn**2) + q * _expectation(drawn**2)
    return mean, max(square - mean**2, 0.0)


def _expectation(values: Floats) -> float:
    """Of a function of a standard normal number, from its values at the nodes."""
    return float(_WEIGHTS @ values / _WEIGHTS.sum())


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
    shares = (inside + outside) / 2  # of all canaries, above each threshold: decreasing
    numbers = np.unique(np.round(_SHARES * canaries).astype(int))
    # Half of the canaries are members: so many of the highest, or of the lowest, are expected to be guessed right.
    right_members = np.interp(numbers / canaries, shares[::-1], inside[::-1]) * canaries / 2
    right_others = np.interp(1 - numbers / canaries, shares[::-1], 1 - outside[::-1]) * canaries / 2
    # All pairs of numbers: members down, others across.
    guesses = numbers[:, None] + numbers
    right = right_members[:, None] + right_others
    wrong = np.maximum(guesses - right, 0)
    is_possible = (guesses > 0) & (guesses <= canaries)
    # The Clopper-Pearson limit of the share of right guesses; its log-odds are the ε that is refuted.
    limits = np.where(is_possible, stats.beta.ppf(level, np.maximum(right, 1e-9), wrong + 1), 0.0)
    members, others = np.unravel_index(int(limits.argmax()), limits.shape)
    return Guesses(int(numbers[members]), int(numbers[others]))


def choose_threshold(canaries: int, expected: ExpectedScores, delta: float, level: float) -> float:
    """The threshold for the best bound from two error rates, if the claim is true; see `two_rates`.

    Args:
        canaries: m.
        expected: What the claim lets expect.
        delta: δ.
        level: Of the bound.
    """
    thresholds = expected.thresholds
    half = canaries / 2  # as many members and others are expected
    inside, outside = expected.above(thresholds)
    # Clopper-Pearson limits of both error rates, of expected numbers of errors, which are no whole ones.
    fpr = special.betaincinv(half * outside + 1, half * (1 - outside) + 1e-9, 1 - level / 2)
    fnr = special.betaincinv(half * (1 - inside) + 1, half * inside + 1e-9, 1 - level / 2)
    with np.errstate(divide="ignore"):
        from_alarms = np.log(np.maximum(1 - fnr - delta, 0) / fpr)
        from_misses = np.log(np.maximum(1 - fpr - delta, 0) / fnr)
    return float(thresholds[int(np.maximum(from_alarms, from_misses).argmax())])
