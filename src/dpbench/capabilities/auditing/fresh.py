"""Tests of the kept residuals: is the noise Gaussian, and fresh for each release and coordinate?

All are of the measured scale of the noise, which has a test of its own.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special, stats
from scipy.spatial import KDTree

from dpbench.capabilities.auditing.declared import Check, chi_squared_p_value, two_sided
from dpbench.capabilities.canaries.residuals import Residuals
from dpbench.capabilities.canaries.scores import Floats, Scores

_FEWEST_OBSERVATIONS = 200
_FEWEST_RELEASES = 8
NAMES = (
    "accumulated noise",
    "spectrum of the noise",
    "closest releases",
    "closest canaries",
    "kurtosis of the noise",
    "canary by canary",
    "release by release",
)
"""Names of the tests."""


def fresh_noise(scores: Scores) -> dict[str, Check | None]:
    """Test whether the noise is Gaussian and independent from release to release and from canary to canary.

    - accumulated noise: variance of the noise of a canary summed over the releases, over that of independent noise, by
      the exact χ² distribution: too little where noise cancels, too much where it repeats.
    - spectrum of the noise: geometric over arithmetic mean of the power at each frequency, by the exact moments of its
      logarithm: 1 for noise without a memory, and less for any other stationary noise, at any lag.
    - closest releases: distance of the two most similar releases, up to the sign, in sixteen directions: near 0 where
      noise comes twice, at any distance. By the χ² distribution for each pair, and the number of pairs.
    - closest canaries: the same of two canaries, in four projections of all of their releases: near 0 where two
      coordinates share their noise.
    - kurtosis of the noise: 3 for Gaussian noise, less where tails are cut, more where some releases or coordinates
      have less noise and others more.
    - canary by canary, release by release: deviation of the noise of the quietest or the loudest one, whichever is
      less likely, by the χ² distribution of each, and their number.

    Args:
        scores: The observations; those in files of earlier versions are not tested.

    Returns:
        Test by name; None where there is nothing to test.
    """
    residuals = scores.residuals
    canaries, releases = scores.canaries, scores.releases
    if residuals is None or not residuals.squared:
        return dict.fromkeys(NAMES)
    variance = residuals.squared / (canaries * releases)
    std = math.sqrt(variance)
    by_release = np.array(residuals.over_canaries)[:, :canaries] / std
    by_canary = residuals.by_canary / variance
    tests = (
        _accumulated(residuals.over_releases[0] / std, releases),
        _spectrum(by_release),
        _closest(by_release),
        _closest(_standardized(residuals, std)),
        _kurtosis(residuals, canaries * releases),
        _extreme(by_canary.min(), by_canary.max(), releases, canaries),
        _extreme(residuals.quietest / variance, residuals.loudest / variance, canaries, releases),
    )
    return dict(zip(NAMES, tests, strict=True))


def _accumulated(sums: Floats, releases: int) -> Check | None:
    """Test sums of the noise over all releases, one of each canary, in deviations of one release's noise."""
    if releases < 2:
        return None
    index = float(sums @ sums) / releases
    return Check(index / len(sums), 1.0, chi_squared_p_value(index, len(sums)))


def _spectrum(noise: Floats) -> Check | None:
    """Test the spectral flatness of the noise of releases in some directions, shape (T, k).

    The logarithm of a gamma variable of shape a and scale b has the mean ψ(a) + ln b, variance ψ'(a) and third cumulant
    ψ''(a); the sum over the frequencies is compared with the Pearson III distribution of these moments.
    """
    releases, directions = noise.shape
    if releases < _FEWEST_RELEASES:
        return None
    spectrum = np.fft.rfft(noise, axis=0, norm="ortho")
    power = np.square(np.abs(spectrum)).sum(1)
    # Where the transform is real, the power is χ² of k degrees of freedom, elsewhere half of one of 2k.
    is_real = np.zeros(len(power), dtype=np.bool_)
    is_real[0] = True
    is_real[-1] = releases % 2 == 0
    shape = np.where(is_real, directions / 2, directions)
    scale = np.where(is_real, 2.0, 1.0)
    mean = special.digamma(shape) + np.log(scale)
    variance = float(special.polygamma(1, shape).sum())
    third = float(special.polygamma(2, shape).sum())
    # Noise that cancels has no power at some frequencies, whose logarithm would be infinite.
    power = np.maximum(power, np.finfo(float).tiny)
    excess = float((np.log(power) - mean).sum())
    # One-sided: a memory of any kind makes the spectrum less flat, and none more.
    skewness = third / variance**1.5
    p_value = stats.pearson3.cdf(excess / math.sqrt(variance), skewness)
    flatness = math.exp(excess / len(power))
    return Check(flatness, 1.0, float(p_value))


def _standardized(residuals: Residuals, std: float) -> Floats:
    """Sums over the releases, shape (m, 4), of which independent noise makes independent normal numbers."""
    covariance = residuals.weights
    if np.linalg.matrix_rank(covariance) < len(covariance):  # fewer releases than projections
        return np.empty((0, len(covariance)))
    root = np.linalg.cholesky(covariance)
    return np.linalg.solve(root, residuals.over_releases / std).T


def _closest(points: Floats) -> Check | None:
    """Test of the two most similar of some vectors of independent normal numbers, or opposite ones, shape (n, k).

    The difference of two has twice the variance: half of its square is χ² of k degrees of freedom.
    """
    count, dimensions = points.shape
    if count < 2 or not dimensions:
        return None
    tree = KDTree(points)
    distance = math.inf
    for sign in (1.0, -1.0):
        distances, neighbors = tree.query(sign * points, k=2)  # one of the two may be the point itself
        is_another = neighbors != np.arange(count)[:, None]
        distance = min(distance, float(distances[is_another].min()))
    pairs = count * (count - 1)  # with both signs
    so_near = float(stats.chi2.cdf(distance**2 / 2, dimensions))
    p_value = min(1.0, pairs * so_near)
    # The median of the smallest of so many distances, if all were independent: (1 − p)^pairs = 1/2.
    quantile = min(0.5, math.log(2) / pairs)
    median = 2 * float(stats.chi2.ppf(quantile, dimensions))
    return Check(distance, math.sqrt(median), p_value)


def _extreme(least: float, most: float, freedom: int, count: int) -> Check | None:
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
    below = float(tail.cdf(least))
    above = float(tail.sf(most))
    unlikelier = least if below < above else most
    # Both tails of each of them (Bonferroni).
    p_value = min(1.0, 2 * count * min(below, above))
    return Check(math.sqrt(unlikelier / freedom), 1.0, p_value)


def _kurtosis(residuals: Residuals, n: int) -> Check | None:
    """Test the kurtosis of n numbers by its exact moments (Anscombe & Glynn 1983) and the Pearson III distribution."""
    if n < _FEWEST_OBSERVATIONS:
        return None
    kurtosis = n * residuals.fourth / residuals.squared**2
    # b₂, the kurtosis of normal numbers, has the mean 3(n − 1)/(n + 1), ...
    mean = 3 * (n - 1) / (n + 1)
    # ... the variance 24n(n − 2)(n − 3)/((n + 1)²(n + 3)(n + 5)), ...
    variance = 24.0 * n * (n - 2) * (n - 3)
    variance /= (n + 1) ** 2 * (n + 3) * (n + 5)
    # ... and the skewness √β₁ = 6(n² − 5n + 2)/((n + 7)(n + 9)) · √(6(n + 3)(n + 5)/(n(n − 2)(n − 3))).
    skewness = 6.0 * (n**2 - 5 * n + 2)
    skewness /= (n + 7) * (n + 9)
    skewness *= math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    tail = stats.pearson3(skewness)
    deviation = (kurtosis - mean) / math.sqrt(variance)
    return Check(kurtosis, 3.0, two_sided(tail.cdf(deviation), tail.sf(deviation)))
