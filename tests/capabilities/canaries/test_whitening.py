"""Canaries in correlated noise: one observation in a round, with the declared sensitivity and independent noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular, toeplitz

from dpbench.capabilities.canaries.whitening import Rounds
from dpbench.capabilities.correlated.banded import Banded
from tests.support.checks import accepts_scale

LENGTH, STEPS, CANARIES = 4, 43, 400
C = Banded(3).coefficients
Z, RATE = 0.7, 0.3


def world() -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float64]]:
    """Groups, draws and correlated noise of standard deviation one when whitened, shapes (m,), (T, m) and (T, m)."""
    rng = np.random.default_rng(0)
    group = rng.integers(LENGTH, size=CANARIES)
    is_turn = (np.arange(STEPS)[:, None] - group) % LENGTH == 0
    drawn = is_turn & (rng.random((STEPS, CANARIES)) < RATE)
    matrix = toeplitz([*C, *np.zeros(STEPS - len(C))], np.zeros(STEPS))
    noise = solve_triangular(matrix, rng.standard_normal((STEPS, CANARIES)), lower=True)
    return group, drawn, noise


GROUP, DRAWN, NOISE = world()


def observations(seen: NDArray[Any], coefficients: Any = C) -> tuple[NDArray[Any], NDArray[Any]]:
    """(rounds, m) observations and who was drawn."""
    rounds = Rounds.beginning(coefficients, LENGTH, GROUP)
    pairs = [pair for pair in map(rounds.add, seen, DRAWN) if pair is not None]
    assert rounds.complete == len(pairs)
    x, there = (np.array(part) for part in zip(*pairs, strict=True))
    return x, there


def test_a_participation_is_seen_once_and_whole() -> None:
    x, there = observations(DRAWN.astype(float))
    assert len(x) == (STEPS + 1) // LENGTH - 1
    expected = [DRAWN[GROUP + LENGTH * number, np.arange(CANARIES)] for number in range(len(x))]
    np.testing.assert_array_equal(there, expected)
    np.testing.assert_allclose(x, expected, atol=1e-12)


def test_the_noise_of_observations_is_that_of_independent_noise() -> None:
    x, _ = observations(NOISE)
    assert accepts_scale(x.ravel(), 1.0)
    lag = (x[1:] * x[:-1]).sum() / np.sqrt(x[1:].size)
    assert abs(lag) < 4.5
    plain, _ = observations(NOISE, [1.0])
    assert plain.std() > 1.1  # in releases as they are there is more
