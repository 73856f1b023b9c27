"""Whether noise, sensitivity and lots are as declared: two-sided, as an auditor sees who knows who was drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dpbench.auditing.independent import clopper_pearson_upper
from dpbench.privacy.canaries.probes import Probes
from dpbench.privacy.canaries.scores import CorrelationSums, GameSums, Scores

MOST_RATIO = 1e3  # of measured and declared; a mechanism beyond is broken, however far
_FEWEST_OBSERVATIONS = 30
_LEAST_VARIANCE = 0.05  # of the number of lots that a canary is in, for the test of its dispersion


@dataclass(frozen=True)
class Measured:
    """A measured quantity over the declared one.

    Attributes:
        value: Estimate.
        low, high: Confidence limits.
    """

    value: float
    low: float
    high: float

    def times(self, declared: float) -> Measured:
        """The quantity itself."""
        return Measured(*(declared * number for number in (self.value, self.low, self.high)))


@dataclass(frozen=True)
class ReleaseGame:
    """The game on single releases: x = S·b + noise, b known (after Nasr et al. 2023, section 6.4).

    Assumes: noise that is independent from canary to canary and release to release; `noise`, `move` and `ratio` also
    that it is Gaussian.

    Attributes:
        declared_mu: Largest declared S/σ of a release, as far as canaries reach.
        noise: Measured over declared deviation, by the χ² distribution.
        move: Measured over declared S, by Student's t.
        ratio: Measured over declared S/σ, by the noncentral t (as approximated by Johnson & Welch 1940).
        ratio_by_errors: Lower limit of the same, of one release, for noise of any shape, by Clopper-Pearson limits of
            both errors at the middle, and μ ≥ Φ⁻¹(1−FPR) − Φ⁻¹(FNR) for any μ-GDP release. What several releases
            compose to is that of the family alone, whose noise is Gaussian.
    """

    declared_mu: float
    noise: Measured
    move: Measured
    ratio: Measured
    ratio_by_errors: float


def release_game(sums: GameSums, level: float) -> ReleaseGame | None:
    """Limits of noise and sensitivity from all releases and canaries together.

    By least squares of what was seen on what was declared, in declared deviations, with a constant.

    Args:
        sums: What was seen.
        level: Probability of missing the truth: for each interval, both sides together; for each lower limit of μ that
            is used alone, half of it.

    Returns:
        None where nobody was drawn, or everybody always, so that there is nothing to compare.
    """
    n, free = sums.count, sums.count - 2
    if n < _FEWEST_OBSERVATIONS or not sums.ins or not sums.outs:
        return None
    moves = sums.move_squared - sums.move**2 / n
    if moves <= 1e-9 * sums.move_squared:
        return None
    both = sums.product - sums.move * sums.residual / n
    rest = sums.residual_squared - sums.residual**2 / n - both**2 / moves
    std = math.sqrt(max(rest / free, MOST_RATIO**-4))
    move, error = 1 + both / moves, std / math.sqrt(moves)
    width = stats.t.isf(level / 2, free) * error
    noise = [std * math.sqrt(free / stats.chi2.isf(tail, free)) for tail in (level / 2, 1 - level / 2)]
    return ReleaseGame(
        declared_mu=sums.most_mu,
        noise=Measured(std, float(noise[0]), float(noise[1])),
        move=Measured(move, float(move - width), float(move + width)),
        ratio=_ratio(move / error, free, math.sqrt(moves), level),
        ratio_by_errors=_ratio_by_errors(sums, level / 2),
    )


def _ratio(t: float, free: int, scale: float, level: float) -> Measured:
    """Limits of the noncentrality of t over `scale`."""
    z = stats.norm.isf(level / 2)
    middle, width = t * (1 - 1 / (4 * free)), z * math.sqrt(1 + t**2 / (2 * free))
    cut = [float(min(max(value / scale, -MOST_RATIO), MOST_RATIO)) for value in (t, middle - width, middle + width)]
    return Measured(*cut)


def _ratio_by_errors(sums: GameSums, level: float) -> float:
    """Where releases differ, over the largest μ that was declared, below which no average of such releases falls."""
    alarms = clopper_pearson_upper(sums.alarms, sums.outs, level / 2)
    misses = clopper_pearson_upper(sums.misses, sums.ins, level / 2)
    if alarms >= 1 or misses >= 1:
        return 0.0
    return max(0.0, float(stats.norm.isf(alarms) - stats.norm.ppf(misses))) / sums.most_mu


@dataclass(frozen=True)
class Checked:
    """A test of something that was declared.

    Attributes:
        value: Measured.
        expected: Under the declaration.
        p_value: Two-sided.
    """

    value: float
    expected: float
    p_value: float


@dataclass(frozen=True)
class Participation:
    """Tests of the lots and of the independence of the noise; None where there is nothing to test.

    Attributes:
        rate: How often canaries were drawn, by the exact binomial test (which is conservative where rates differ, and
            for lots of a fixed size).
        dispersion: Variance of the number of lots that a canary was in over that of independent lots at the measured
            rate, by a χ² distribution with the mean and variance of that index.
        lag: Correlation of the noise of consecutive releases, same canary.
        shared: Variance of the noise that the canaries of a release share, over what independent noise would have, by
            a χ² distribution.
    """

    rate: Checked | None
    dispersion: Checked | None
    lag: Checked | None
    shared: Checked | None


def participation(scores: Scores, independent_lots: bool = True) -> Participation:
    """Test whether lots were drawn as declared, and whether the noise is fresh.

    Args:
        scores: What was seen.
        independent_lots: Whether lots are declared to be drawn independently of each other; otherwise numbers of draws
            are not binomial, and the lots are not tested.
    """
    return Participation(
        rate=_rate(scores) if independent_lots else None,
        dispersion=_dispersion(scores) if independent_lots else None,
        lag=_lag(scores.correlation),
        shared=_shared(scores),
    )


def _counts(scores: Scores) -> NDArray[np.int64]:
    """In how many lots those canaries were that can be drawn."""
    return scores.drawn if scores.replace_one else scores.drawn[scores.member]


def _rate(scores: Scores) -> Checked | None:
    counts = _counts(scores)
    trials, rate = len(counts) * scores.releases, min(1.0, scores.lots.mean / max(scores.releases, 1))
    if not trials:
        return None
    drawn = int(min(counts.sum(), trials))
    return Checked(drawn / trials, rate, float(stats.binomtest(drawn, trials, rate).pvalue))


def _dispersion(scores: Scores) -> Checked | None:
    counts, lots = _counts(scores), scores.lots
    if len(counts) < 2 or scores.releases < 2 or lots.variance < _LEAST_VARIANCE:
        return None
    free, measured = len(counts) - 1, counts.mean() / lots.mean
    variance = measured * lots.mean - measured**2 * (lots.mean - lots.variance)  # of rates that are off by one factor
    if variance < _LEAST_VARIANCE:
        return None
    index = float(((counts - counts.mean()) ** 2).sum()) / variance
    # Variance of the index over that of a χ², by the delta method: 1 for Poisson numbers, 1 − 1/T for binomial ones.
    spread = 1 - (lots.variance - lots.cumulant) / (6 * lots.variance**2)
    tail = stats.chi2(free / spread)
    return Checked(index / free, 1.0, two_sided(tail.cdf(index / spread), tail.sf(index / spread)))


def _lag(sums: CorrelationSums) -> Checked | None:
    squares = math.sqrt(sums.earlier_squared) * math.sqrt(sums.later_squared)
    if not sums.pairs or squares == 0:
        return None
    value = sums.product / squares
    return Checked(value, 0.0, two_sided(*(stats.norm.sf(sign * value * math.sqrt(sums.pairs)) for sign in (-1, 1))))


def _shared(scores: Scores) -> Checked | None:
    squares, releases = scores.game.residual_squared, scores.releases
    if scores.canaries < 2 or not releases or squares == 0:
        return None
    index = scores.correlation.across / squares
    tail = stats.chi2(releases)
    return Checked(index, 1.0, two_sided(tail.cdf(index * releases), tail.sf(index * releases)))


def statistics_noise(probes: Probes) -> Checked | None:
    """Test the noise on what is released beside the gradients: deviation over the declared one, by the χ² distribution.

    Args:
        probes: What the run measured of itself.
    """
    if not probes.statistics:
        return None
    tail, squares = stats.chi2(probes.statistics), probes.statistics_squared
    value = math.sqrt(squares / probes.statistics)
    return Checked(value, 1.0, two_sided(tail.cdf(squares), tail.sf(squares)))


def lot_sizes(probes: Probes) -> Checked | None:
    """Test the variance of the size of lots, over the declared one.

    By a χ² distribution with the mean and variance of that index. Lots of a fixed size have no other size.

    Args:
        probes: What the run measured of itself.
    """
    lots, variance = probes.lots, probes.size_variance
    if not lots:
        return None
    if not variance:
        right = not probes.size_squared
        return Checked(1.0 if right else math.inf, 1.0, float(right))
    index, mean_variance = probes.size_squared / (variance / lots), variance / lots
    spread = 1 + probes.size_cumulant / lots / (2 * mean_variance**2)
    tail = stats.chi2(lots / spread)
    return Checked(index / lots, 1.0, two_sided(tail.cdf(index / spread), tail.sf(index / spread)))


def two_sided(below: float, above: float) -> float:
    """The p-value of a test by both of its tails."""
    return min(1.0, 2 * float(min(below, above)))
