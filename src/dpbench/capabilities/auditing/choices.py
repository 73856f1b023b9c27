"""What an auditor decides before looking: how many guesses, and where the threshold lies, from the claim alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import special, stats

from dpbench.capabilities.auditing.one_run import Guesses
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
        means = np.array([self.mean_in, self.mean_out])
        reach = 5 * np.array([self.std_in, self.std_out])  # scores beyond five deviations are not to be expected
        return np.linspace((means - reach).min(), (means + reach).max(), 1001)


def expected_scores(events: Mapping[Event, int], replace_one: bool = False, reach: float = 1.0) -> ExpectedScores:
    """Moments of the scores under the claim, by Gauss-Hermite quadrature for each distinct release.

    Args:
        events: How often each release was made.
        replace_one: As for `log_likelihood_ratio`.
        reach: As for `log_likelihood_ratio`.
    """
    # Of members and of others: by how much a canary moves the sum where it is drawn.
    moves = np.array([reach / 2, -reach / 2] if replace_one else [reach, 0.0])
    means = np.zeros(2)
    variances = np.zeros(2)
    for (sampling, queries), count in events.items():
        if sampling.is_free:  # the first lot of a round stands for it
            continue
        z = effective_noise_multiplier(queries)
        q = min(1.0, sampling.group_rate)
        ratio = partial(
            log_likelihood_ratio,
            noise_multiplier=z,
            sample_rate=q,
            replace_one=replace_one,
            reach=reach,
        )
        # Releases are independent: means and variances of their sum add up.
        for place, move in enumerate(moves):
            mean, variance = _moments(ratio, move, z, q)
            means[place] += count * mean
            variances[place] += count * variance
    mean_in, mean_out = means.tolist()
    std_in, std_out = np.maximum(np.sqrt(variances), _LEAST_DEVIATION).tolist()
    return ExpectedScores(mean_in, std_in, mean_out, std_out)


def _moments(ratio: Callable[[Floats], Floats], move: float, z: float, q: float) -> tuple[float, float]:
    """Mean and variance of the log-likelihood ratio of one release.

    Args:
        ratio: Of observations.
        move: By how much the canary moves the sum where it is drawn.
        z: Noise multiplier.
        q: Rate at which it is drawn.
    """
    noise = z * _NODES
    # What is seen is a mixture: noise alone where the canary is not drawn, moved noise where it is.
    values = np.stack([ratio(noise + 0.0), ratio(noise + move)])
    weights = np.outer([1 - q, q], _WEIGHTS / _WEIGHTS.sum())
    mean = float((weights * values).sum())
    square = float((weights * values**2).sum())
    return mean, max(square - mean**2, 0.0)


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
    limits = stats.beta.ppf(level, np.maximum(right, 1e-9), wrong + 1)
    limits[~is_possible] = 0.0
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
    false_alarms = half * outside
    misses = half * (1 - inside)
    fpr = special.betaincinv(false_alarms + 1, half - false_alarms + 1e-9, 1 - level / 2)
    fnr = special.betaincinv(misses + 1, half - misses + 1e-9, 1 - level / 2)
    # Both directions of (ε, δ)-DP, see `two_rates`.
    with np.errstate(divide="ignore"):
        from_alarms = np.log(np.maximum(1 - fnr - delta, 0) / fpr)
        from_misses = np.log(np.maximum(1 - fpr - delta, 0) / fnr)
    return float(thresholds[int(np.maximum(from_alarms, from_misses).argmax())])
