"""Projections and moments of the noise that an auditor saw, for tests of whether it is fresh, Gaussian and independent.

A residual is the observation of a canary in a release minus its declared share, in declared standard deviations. Those
of a right mechanism are independent standard normal numbers, one for each canary and release: a matrix that is too
large to be kept, of which those projections are kept that show the structure of the noise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from dpbench.capabilities.canaries.arrays import FloatArray, Sums

Floats = NDArray[np.float64]

OVER_RELEASES = 4  # projections of a canary's residuals, the first of which is their sum
OVER_CANARIES = 16  # projections of a release's residuals
MOST_RELEASES = 4096  # whose projections are kept; noise that repeats does so among these, too
_DIRECTIONS = 20_261  # seed of the directions, which are the same in each audit
_DIGITS = 6  # of a projection of a release


class Residuals(Sums):
    """Projections and moments of the residuals of m canaries in T releases.

    Attributes:
        squared, fourth: Sums of the second and the fourth powers of all residuals.
        over_releases: (4, m) for each canary the sums of its residuals over the releases: the plain sum, and three with
            weights that are normal numbers, a function of the number of the release.
        weights: (4, 4) sums over the releases of the products of these weights: T times the covariance of the columns
            of `over_releases`.
        by_canary: (m,) sums of the squares of each canary.
        quietest, loudest: Smallest and largest sum of the squares of a release.
        over_canaries: Residuals of each of the first 4,096 releases in sixteen orthonormal directions.
    """

    squared: float = 0.0
    fourth: float = 0.0
    over_releases: FloatArray
    weights: FloatArray
    by_canary: FloatArray
    quietest: float = 0.0
    loudest: float = 0.0
    over_canaries: list[Annotated[list[float], Field(min_length=OVER_CANARIES, max_length=OVER_CANARIES)]]

    @classmethod
    def none_of(cls, canaries: int) -> Residuals:
        """Begin with no release of m canaries."""
        return cls(
            over_releases=np.zeros((OVER_RELEASES, canaries)),
            weights=np.zeros((OVER_RELEASES, OVER_RELEASES)),
            by_canary=np.zeros(canaries),
            over_canaries=[],
        )

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        shapes = self.over_releases.shape, self.weights.shape
        if shapes != ((OVER_RELEASES, self.by_canary.size), (OVER_RELEASES, OVER_RELEASES)):
            raise ValueError("over_releases, weights and by_canary differ in length")
        return self

    def add(self, residual: Floats, release: int) -> None:
        """Add one release.

        Args:
            residual: (m,) finite.
            release: Its number, from 0 on.
        """
        weights = release_weights(release)
        squares = residual**2
        power = float(squares.sum())
        self.squared += power
        self.fourth += float(squares @ squares)
        self.by_canary += squares
        if self.over_canaries:
            self.quietest = min(self.quietest, power)
            self.loudest = max(self.loudest, power)
        else:
            self.quietest = self.loudest = power
        self.over_releases += weights[:, None] * residual
        self.weights += np.outer(weights, weights)
        if len(self.over_canaries) < MOST_RELEASES:
            projections = directions(len(residual)) @ residual
            self.over_canaries.append(np.round(projections, _DIGITS).tolist())


def release_weights(release: int) -> Floats:
    """Weights of a release in the sums of a canary's residuals, shape (4,): one, and three normal numbers."""
    normal = _generator(release).standard_normal(OVER_RELEASES - 1)
    return np.concatenate([np.ones(1), normal])


def _generator(number: int) -> np.random.Generator:
    """Random numbers that are the same in each audit."""
    return np.random.Generator(np.random.PCG64DXSM([_DIRECTIONS, number]))


@lru_cache(maxsize=4)
def directions(canaries: int) -> Floats:
    """Orthonormal directions among the canaries, shape (16, m).

    Fewer than sixteen canaries have as many directions; the others are zero.
    """
    count = min(canaries, OVER_CANARIES)
    normal = _generator(canaries).standard_normal((canaries, count))
    orthonormal, _ = np.linalg.qr(normal)
    basis = np.zeros((OVER_CANARIES, canaries))
    basis[:count] = orthonormal.T
    return basis
