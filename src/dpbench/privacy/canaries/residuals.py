"""Projections and moments of the noise that an auditor saw, for tests of whether it is fresh, Gaussian and independent.

A residual is what was seen of a canary in a release, beyond what it should have added, in declared standard deviations.
Those of a right mechanism are independent standard normal numbers, one for each canary and release: a matrix that is
too large to be kept, of which the projections are kept that show what noise can be made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

OVER_RELEASES = 4  # projections of a canary's residuals, the first of which is their sum
OVER_CANARIES = 16  # projections of a release's residuals
MOST_RELEASES = 4096  # whose projections are kept; noise that repeats does so among these, too
_DIRECTIONS = 20_261  # seed of the directions, which are the same in each audit
_DIGITS = 6  # of a projection of a release


@dataclass(frozen=True, eq=False)
class Residuals:
    """Projections and moments of the residuals of m canaries in T releases.

    Attributes:
        squared, fourth: Sums of the second and the fourth powers of all residuals.
        over_releases: (4, m) for each canary the sums of its residuals over the releases: the plain sum, and three with
            weights that are normal numbers, a function of the number of the release.
        weights: (4, 4) sums over the releases of the products of these weights: T times the covariance of the columns
            of `over_releases`.
        by_canary: (m,) sums of the squares of each canary.
        quietest, loudest: Smallest and largest sum of the squares of a release.
        over_canaries: (min(T, 4096), 16) for each release its residuals in sixteen orthonormal directions.
    """

    squared: float
    fourth: float
    over_releases: Floats
    weights: Floats
    by_canary: Floats
    quietest: float
    loudest: float
    over_canaries: Floats

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers come back bit-identical."""
        return {
            "squared": self.squared,
            "fourth": self.fourth,
            "over_releases": self.over_releases.tolist(),
            "weights": self.weights.tolist(),
            "by_canary": self.by_canary.tolist(),
            "quietest": self.quietest,
            "loudest": self.loudest,
            "over_canaries": self.over_canaries.tolist(),
        }

    @classmethod
    def from_json(cls, data: object, canaries: int) -> Residuals:
        """Inverse of `to_json`.

        Raises:
            ValueError: It is something else, or of another number of canaries.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "squared": (),
            "fourth": (),
            "over_releases": (OVER_RELEASES, canaries),
            "weights": (OVER_RELEASES, OVER_RELEASES),
            "by_canary": (canaries,),
            "quietest": (),
            "loudest": (),
            "over_canaries": (-1, OVER_CANARIES),
        }
        if not isinstance(data, Mapping) or set(data) != set(shapes):
            raise ValueError(f"residuals should have the keys {', '.join(shapes)}")
        arrays = {}
        for name, shape in shapes.items():
            arrays[name] = _array(data[name], shape, f"residuals.{name}")
        return cls(
            squared=float(arrays["squared"]),
            fourth=float(arrays["fourth"]),
            over_releases=arrays["over_releases"],
            weights=arrays["weights"],
            by_canary=arrays["by_canary"],
            quietest=float(arrays["quietest"]),
            loudest=float(arrays["loudest"]),
            over_canaries=arrays["over_canaries"],
        )


def _array(data: object, shape: tuple[int, ...], name: str) -> Floats:
    """Finite numbers in a shape, in which a first length of -1 is any."""
    try:
        array = np.array(data, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} holds something else than numbers") from None
    expected = shape
    if shape[:1] == (-1,):
        width = shape[1]
        expected = (array.size // width, width)
    if not array.size and 0 in expected:  # an empty list does not tell its width
        array = array.reshape(expected)
    if array.shape != expected or not np.isfinite(array).all():
        raise ValueError(f"{name} is no array of finite numbers of shape {shape}")
    return array


class ResidualSums:
    """Adds up the residuals, release by release.

    Args:
        canaries: m.
    """

    def __init__(self, canaries: int) -> None:
        self._canaries = canaries
        self._squared = 0.0
        self._fourth = 0.0
        self._over_releases = np.zeros((OVER_RELEASES, canaries))
        self._weights = np.zeros((OVER_RELEASES, OVER_RELEASES))
        self._by_canary = np.zeros(canaries)
        self._extremes: tuple[float, float] | None = None  # the quietest and the loudest release
        self._over_canaries: list[list[float]] = []

    def add(self, residual: Floats, release: int) -> None:
        """Add one release.

        Args:
            residual: (m,) finite.
            release: Its number, from 0 on.
        """
        weights = release_weights(release)
        squares = residual**2
        power = float(squares.sum())
        self._squared += power
        self._fourth += float(squares @ squares)
        self._by_canary += squares
        quietest, loudest = self._extremes or (power, power)
        quietest = min(quietest, power)
        loudest = max(loudest, power)
        self._extremes = (quietest, loudest)
        self._over_releases += weights[:, None] * residual
        self._weights += np.outer(weights, weights)
        if len(self._over_canaries) < MOST_RELEASES:
            projections = directions(self._canaries) @ residual
            rounded = np.round(projections, _DIGITS)
            self._over_canaries.append(rounded.tolist())

    def residuals(self) -> Residuals:
        """What was added so far; later releases do not change it."""
        quietest, loudest = self._extremes or (0.0, 0.0)
        over_canaries = np.array(self._over_canaries, dtype=np.float64)
        return Residuals(
            squared=self._squared,
            fourth=self._fourth,
            over_releases=self._over_releases.copy(),
            weights=self._weights.copy(),
            by_canary=self._by_canary.copy(),
            quietest=quietest,
            loudest=loudest,
            over_canaries=over_canaries.reshape(-1, OVER_CANARIES),
        )

    @classmethod
    def of(cls, residuals: Residuals) -> ResidualSums:
        """Sums that go on from what `residuals` gave, bit-identically."""
        sums = cls(residuals.over_releases.shape[1])
        sums._squared = residuals.squared
        sums._fourth = residuals.fourth
        sums._over_releases = residuals.over_releases.copy()
        sums._weights = residuals.weights.copy()
        sums._by_canary = residuals.by_canary.copy()
        if len(residuals.over_canaries):  # any release
            sums._extremes = (residuals.quietest, residuals.loudest)
        sums._over_canaries = residuals.over_canaries.tolist()
        return sums


def release_weights(release: int) -> Floats:
    """Weights of a release in the sums of a canary's residuals, shape (4,): one, and three normal numbers."""
    rng = _generator(release)
    normal = rng.standard_normal(OVER_RELEASES - 1)
    return np.concatenate([np.ones(1), normal])


def _generator(number: int) -> np.random.Generator:
    """Random numbers that are the same in each audit."""
    bits = np.random.PCG64DXSM([_DIRECTIONS, number])
    return np.random.Generator(bits)


@lru_cache(maxsize=4)
def directions(canaries: int) -> Floats:
    """Orthonormal directions among the canaries, shape (16, m).

    Fewer than sixteen canaries have as many directions; the others are zero.
    """
    rng = _generator(canaries)
    count = min(canaries, OVER_CANARIES)
    normal = rng.standard_normal((canaries, count))
    orthonormal, _ = np.linalg.qr(normal)
    basis = np.zeros((OVER_CANARIES, canaries))
    basis[:count] = orthonormal.T
    return basis
