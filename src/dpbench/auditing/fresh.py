"""Whether the noise is Gaussian, and fresh for each release and coordinate: tests of what is kept of the residuals.

All are of the measured scale of the noise, which has a test of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from scipy import special, stats
from scipy.spatial import KDTree

from dpbench.auditing.declared import Checked, two_sided
from dpbench.privacy.canaries.residuals import Residuals
from dpbench.privacy.canaries.scores import Floats, Scores

_FEWEST_OBSERVATIONS = 200
_FEWEST_RELEASES = 8


@dataclass(frozen=True)
class FreshNoise:
    """Tests of the noise over the whole run; None where there is nothing to test.

    Attributes:
        accumulated: Variance of the noise of a canary summed over the releases, over that of independent noise, by the
            exact χ² distribution: too little where noise cancels, too much where it repeats.
        spectrum: Geometric over arithmetic mean of the power at each frequency, by the exact moments of its logarithm:
            1 for noise without a memory, and less for any other stationary noise, whatever the lag.
        releases: Distance of the two most similar releases, up to the sign, in sixteen directions: near 0 where noise
            comes twice, at whatever distance. By the χ² distribution for each pair, and the number of pairs.
        canaries: The same of two canaries, in four projections of all of their releases: near 0 where two coordinates
            share their noise.
        shape: Kurtosis, by Anscombe & Glynn (1983): 3 for Gaussian noise, less where tails are cut, more where some
            releases or coordinates have less noise and others more.
        canary_by_canary, release_by_release: Deviation of the noise of the quietest or the loudest one, whichever is
            less likely, by the χ² distribution of each, and their number.
    """

    accumulated: Checked | None
    spectrum: Checked | None
    releases: Checked | None
    canaries: Checked | None
    shape: Checked | None
    canary_by_canary: Checked | None
    release_by_release: Checked | None


def fresh_noise(scores: Scores) -> FreshNoise:
    """Test whether the noise is Gaussian and independent from release to release and from canary to canary.

    Args:
        scores: What was seen; of files of earlier versions nothing is tested.
    """
    residuals, count = scores.residuals, scores.canaries * scores.releases
    if residuals is None or not count or not residuals.squared:
        return FreshNoise(*[None] * len(fields(FreshNoise)))
    std = math.sqrt(residuals.squared / count)
    by_release = residuals.over_canaries[:, : scores.canaries] / std
    return FreshNoise(
        accumulated=_accumulated(residuals.over_releases[0] / std, scores.releases),
        spectrum=_spectrum(by_release),
        releases=_closest(by_release),
        canaries=_closest(_standardized(residuals, std)),
        shape=_shape(residuals, count),
        canary_by_canary=_extreme(
            residuals.by_canary.min() / std**2,
            residuals.by_canary.max() / std**2,
            scores.releases,
            scores.canaries,
        ),
        release_by_release=_extreme(
            residuals.quietest / std**2,
            residuals.loudest / std**2,
            scores.canaries,
            scores.releases,
        ),
    )


def _accumulated(sums: Floats, releases: int) -> Checked | None:
    if releases < 2:
        return None
    index, tail = float(sums @ sums) / releases, stats.chi2(len(sums))
    return Checked(index / len(sums), 1.0, two_sided(tail.cdf(index), tail.sf(index)))


def _spectrum(seen: Floats) -> Checked | None:
    """Test of releases in some directions, shape (T, k)."""
    releases, directions = seen.shape
    if releases < _FEWEST_RELEASES:
        return None
    power = (np.abs(np.fft.rfft(seen, axis=0, norm="ortho")) ** 2).sum(1)
    # Where the transform is real, the power is χ² of k degrees of freedom, elsewhere half of one of 2k.
    real = np.zeros(len(power), dtype=np.bool_)
    real[0] = True
    real[-1] = releases % 2 == 0
    shape, scale = np.where(real, directions / 2, directions), np.where(real, 2.0, 1.0)
    expected = special.digamma(shape) + np.log(scale)
    variance, third = (float(special.polygamma(order, shape).sum()) for order in (1, 2))
    excess = float((np.log(np.maximum(power, np.finfo(float).tiny)) - expected).sum())
    chance = stats.pearson3.cdf(excess / math.sqrt(variance), third / variance**1.5)
    return Checked(math.exp(excess / len(power)), 1.0, float(chance))


def _standardized(residuals: Residuals, std: float) -> Floats:
    """Sums over the releases, shape (m, 4), of which independent noise makes independent normal numbers."""
    covariance = residuals.weights
    if np.linalg.matrix_rank(covariance) < len(covariance):
        return np.empty((0, len(covariance)))
    root = np.linalg.cholesky(covariance)
    return np.linalg.solve(root, residuals.over_releases / std).T


def _closest(points: Floats) -> Checked | None:
    """Test of the two most similar of some vectors of independent normal numbers, or opposite ones, shape (n, k)."""
    count, dimensions = points.shape
    if count < 2 or not dimensions:
        return None
    tree, distance = KDTree(points), math.inf
    for sign in (1.0, -1.0):
        distances, neighbors = tree.query(sign * points, k=2)
        others = neighbors != np.arange(count)[:, None]
        distance = min(distance, float(distances[others].min()))
    pairs = count * (count - 1)  # with both signs
    chance = min(1.0, pairs * float(stats.chi2.cdf(distance**2 / 2, dimensions)))
    usual = 2 * float(stats.chi2.ppf(min(0.5, math.log(2) / pairs), dimensions))
    return Checked(distance, math.sqrt(usual), chance)


def _extreme(least: float, most: float, freedom: int, count: int) -> Checked | None:
    """Test the smallest and the largest of some sums of squares.

    Args:
        least: Smallest sum.
        most: Largest sum.
        freedom: Number of squares in each.
        count: Number of sums.
    """
    if count < 2:
        return None
    tail = stats.chi2(freedom)
    below, above = float(tail.cdf(least)), float(tail.sf(most))
    value = math.sqrt((least if below < above else most) / freedom)
    return Checked(value, 1.0, min(1.0, 2 * count * min(below, above)))


def _shape(residuals: Residuals, count: int) -> Checked | None:
    if count < _FEWEST_OBSERVATIONS:
        return None
    n, kurtosis = count, count * residuals.fourth / residuals.squared**2
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    deviation = (kurtosis - 3 * (n - 1) / (n + 1)) / math.sqrt(variance)
    skew = 6 * (n**2 - 5 * n + 2) / ((n + 7) * (n + 9)) * math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    freedom = 6 + 8 / skew * (2 / skew + math.sqrt(1 + 4 / skew**2))
    under = 1 + deviation * math.sqrt(2 / (freedom - 4))
    cube_root = math.copysign(((1 - 2 / freedom) / max(abs(under), 1e-12)) ** (1 / 3), under)
    normal = (1 - 2 / (9 * freedom) - cube_root) / math.sqrt(2 / (9 * freedom))
    return Checked(kurtosis, 3.0, two_sided(stats.norm.cdf(normal), stats.norm.sf(normal)))
