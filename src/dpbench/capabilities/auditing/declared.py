"""Checks of declared noise, sensitivity and batches: two-sided, by an auditor who knows which canaries were drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpbench.capabilities.auditing.independent import clopper_pearson_upper
from dpbench.capabilities.auditing.levels import check_level
from dpbench.capabilities.canaries.probes import Probes
from dpbench.capabilities.canaries.scores import GameSums, Scores
from dpbench.capabilities.canaries.whitening import RoundSums

_LEAST_NOISE = 1e-6  # of measured and declared; a mechanism with less is broken, however far
_FEWEST_OBSERVATIONS = 30
_FEWEST_OF_GROUP = 5  # canaries, on average, by which χ² is trusted
_LEAST_VARIANCE = 0.05  # of the number of lots that a canary is in, for the test of its dispersion


@dataclass(frozen=True)
class Check:
    """A test of something that was declared.

    Attributes:
        value: Measured; None where there was nothing to test.
        expected: Declared; of a test without a p-value the most that may be.
        p_value: Two-sided, where the test has one.
        low, high: Confidence limits of the value, where it has any.
        passed: True if they agree; None if there was nothing to test, or before the verdict.
        name: Name of the tested quantity.
    """

    value: float | None = None
    expected: float | None = None
    p_value: float | None = None
    low: float | None = None
    high: float | None = None
    passed: bool | None = None
    name: str = ""

    def judged(self, name: str, level: float, tolerance: float) -> Check:
        """The same with its name, and whether it passed.

        Args:
            name: Name of the tested quantity.
            level: Probability that a right value fails.
            tolerance: Largest difference of a value with limits from the declaration.
        """
        passed = None
        if self.p_value is not None:
            passed = self.p_value >= level
        elif self.low is not None and self.high is not None:
            passed = self.low <= 1 + tolerance and self.high >= 1 - tolerance
        elif self.value is not None and self.expected is not None:
            passed = self.value <= self.expected
        return replace(self, name=name, passed=passed)


@dataclass(frozen=True)
class ReleaseGame:
    """The game on single releases: x = S·b + noise, b known (after Nasr et al. 2023, section 6.4).

    Assumes: Gaussian noise that is independent from canary to canary and release to release.

    Attributes:
        noise: Measured over declared deviation, by the χ² distribution.
        move: Measured over declared S, by Student's t.
        mu: Measured S/σ of a release, where the declared one is largest.
    """

    noise: Check
    move: Check
    mu: float


def release_game(sums: GameSums, level: float) -> ReleaseGame | None:
    """Limits of noise and sensitivity from all releases and canaries together.

    By least squares of observations on declarations, in declared deviations, with a constant. The sums are of
    residuals, from which the declared move is gone: a slope of 0 in them is a move of 1.

    Args:
        sums: The observations.
        level: Probability that an interval misses the truth, both sides together.

    Returns:
        None if no canary was drawn, or all were always, so that there is nothing to compare.

    Raises:
        ConfigurationError: The level is out of range.
    """
    check_level(level)
    n = sums.count
    freedom = n - 2  # a constant and a slope are fitted
    if n < _FEWEST_OBSERVATIONS or not sums.ins or not sums.outs:
        return None
    # Centred sums of squares and products: Sxx, Sxy, and of the regression's errors Syy − Sxy²/Sxx.
    s_xx = sums.move_squared - sums.move**2 / n
    if s_xx <= 1e-9 * sums.move_squared:
        return None
    s_xy = sums.product - sums.move * sums.residual / n
    errors_squared = sums.residual_squared - sums.residual**2 / n - s_xy**2 / s_xx
    std = math.sqrt(max(errors_squared / freedom, _LEAST_NOISE**2))
    slope = 1 + s_xy / s_xx
    half_width = stats.t.isf(level / 2, freedom) * std / math.sqrt(s_xx)
    # f·s²/σ² is χ² of f degrees of freedom.
    std_low = std * math.sqrt(freedom / stats.chi2.isf(level / 2, freedom))
    std_high = std * math.sqrt(freedom / stats.chi2.isf(1 - level / 2, freedom))
    return ReleaseGame(
        noise=Check(std, 1.0, low=std_low, high=std_high),
        move=Check(slope, 1.0, low=float(slope - half_width), high=float(slope + half_width)),
        mu=sums.most_mu * slope / std,
    )


def least_ratio(sums: GameSums, level: float) -> float:
    """Lower limit of S/σ of a release over the largest declared one, for noise of any shape.

    By exact (Clopper-Pearson) limits of both errors at the middle, and μ ≥ Φ⁻¹(1−FPR) − Φ⁻¹(FNR) for any μ-GDP release.
    If releases differ, no average of them falls below the largest declared μ. The composition of several releases is
    known for the family alone, with its Gaussian noise.

    Assumes: noise that is independent from canary to canary and release to release.

    Args:
        sums: The observations of drawn and of other canaries.
        level: Probability of a limit above the truth.

    Raises:
        ConfigurationError: The level is out of range.
    """
    check_level(level)
    fpr = clopper_pearson_upper(sums.alarms, sums.outs, level / 2)
    fnr = clopper_pearson_upper(sums.misses, sums.ins, level / 2)
    if fpr >= 1 or fnr >= 1:
        return 0.0
    mu = float(stats.norm.isf(fpr) - stats.norm.ppf(fnr))
    return max(0.0, mu) / sums.most_mu


def two_sided(below: float, above: float) -> float:
    """The p-value of a test by both of its tails."""
    return min(1.0, 2 * float(min(below, above)))


def chi_squared_p_value(squares: float, freedom: float) -> float:
    """Two-sided p-value of a sum of squares of as many independent standard normal numbers.

    Args:
        squares: The sum.
        freedom: How many; no whole number where the χ² distribution is fitted by mean and variance.
    """
    tail = stats.chi2(freedom)
    return two_sided(tail.cdf(squares), tail.sf(squares))


def participation(scores: Scores) -> dict[str, Check | None]:
    """Test how often canaries were drawn, where batches are declared to be drawn independently of each other.

    Args:
        scores: The observations.

    Returns:
        Test by name; None where there is nothing to test. "rate" is the exact binomial test (which is conservative
        where rates differ, and for batches of a fixed size). "dispersion" is the variance of the number of batches
        that a canary was in over that of independent batches at the measured rate, by a χ² distribution with the mean
        and variance of that index.
    """
    return {"rate": _rate(scores), "dispersion": _dispersion(scores)}


def _counts(scores: Scores) -> NDArray[np.int64]:
    """In how many batches those canaries were that can be drawn."""
    return scores.drawn if scores.replace_one else scores.drawn[scores.member]


def _rate(scores: Scores) -> Check | None:
    counts = _counts(scores)
    trials = len(counts) * scores.observations
    if not trials:
        return None
    rate = min(1.0, scores.lots.mean / scores.observations)
    drawn = int(min(counts.sum(), trials))
    return Check(drawn / trials, rate, float(stats.binomtest(drawn, trials, rate).pvalue))


def _dispersion(scores: Scores) -> Check | None:
    counts = _counts(scores)
    lots = scores.lots
    if len(counts) < 2 or scores.observations < 2 or lots.variance < _LEAST_VARIANCE:
        return None
    # Variance Σ cq(1 − cq) of rates that are all off by one factor c, from Σq and Σq² = Σq − Σq(1 − q).
    factor = counts.mean() / lots.mean
    variance = factor * lots.mean - factor**2 * (lots.mean - lots.variance)
    if variance < _LEAST_VARIANCE:
        return None
    freedom = len(counts) - 1
    squares = np.square(counts - counts.mean()).sum()
    index = float(squares) / variance
    # Variance of the index over that of a χ², by the delta method: 1 for Poisson numbers, 1 − 1/T for binomial ones.
    spread = 1 - (lots.variance - lots.cumulant) / (6 * lots.variance**2)
    p_value = chi_squared_p_value(index / spread, freedom / spread)
    return Check(index / freedom, 1.0, p_value)


def group_sizes(rounds: RoundSums) -> Check | None:
    """Test whether groups are drawn uniformly, by Pearson's χ² of the canaries in each: two-sided.

    Too even are groups that records are dealt to, so that one that comes or goes moves others to another group.

    Args:
        rounds: Sums over them.
    """
    freedom = rounds.length - 1
    expected = sum(rounds.members) / rounds.length
    if not freedom or expected < _FEWEST_OF_GROUP:
        return None
    index = sum((count - expected) ** 2 for count in rounds.members) / expected
    return Check(index / freedom, 1.0, chi_squared_p_value(index, freedom))


def statistics_noise(probes: Probes) -> Check | None:
    """Test the noise on statistics released with the gradients: deviation over the declared one, by the χ² test.

    Args:
        probes: The run's measurements.
    """
    if not probes.statistics:
        return None
    std = math.sqrt(probes.statistics_squared / probes.statistics)
    return Check(std, 1.0, chi_squared_p_value(probes.statistics_squared, probes.statistics))


def lot_sizes(probes: Probes) -> Check | None:
    """Test the variance of the size of batches, over the declared one.

    By a χ² distribution with the mean and variance of that index. Batches of a fixed size have no other size.

    Args:
        probes: The run's measurements.
    """
    lots = probes.lots
    if not lots:
        return None
    if not probes.size_variance:
        is_right = not probes.size_squared
        return Check(1.0 if is_right else math.inf, 1.0, float(is_right))
    variance = probes.size_variance / lots
    index = probes.size_squared / variance
    # Variance of the index over that of a χ² with as many degrees of freedom as lots: 1 + κ₄/(2·σ⁴).
    spread = 1 + probes.size_cumulant / lots / (2 * variance**2)
    return Check(index / lots, 1.0, chi_squared_p_value(index / spread, lots / spread))
