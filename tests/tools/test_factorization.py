"""Banded Toeplitz factorizations: against dense matrices, all patterns of participation, and jax_privacy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from tools.factorization import (
    Floats,
    coefficients_for,
    expected_error,
    square_root_coefficients,
)

MOMENTUM = 10 * (1 - 0.9 ** np.arange(1.0, 61))
"""How far a unit of gradient moves SGD with a momentum of 0.9."""


def dense(first_column: Floats, steps: int) -> Floats:
    """The lower triangular Toeplitz matrix."""
    column = np.zeros(steps)
    column[: len(first_column)] = first_column[:steps]
    return toeplitz(column, np.zeros(steps))


def participation_patterns(steps: int, separation: int, most: int) -> Iterator[tuple[int, ...]]:
    """Each set of at most `most` steps, any two of them at least `separation` apart."""
    for count in range(1, most + 1):
        for pattern in combinations(range(steps), count):
            gaps = np.diff(pattern)
            if count == 1 or gaps.min() >= separation:
                yield pattern


def largest_change(matrix: Floats, pattern: tuple[int, ...]) -> float:
    """Most that C G moves, with a vector of norm 1 at each step of a pattern: alike, opposed and orthogonal ones."""
    gram = matrix[:, pattern].T @ matrix[:, pattern]
    # Σ_ij <g_i, g_j> gram_ij is largest at signs of the gram matrix, at most the sum of its absolute values.
    return math.sqrt(np.abs(gram).sum())


@pytest.mark.parametrize("bands", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_sensitivity_is_the_root_of_the_participations(bands: int, most: int) -> None:
    steps = 11
    matrix = dense(coefficients_for(np.ones(steps), bands), steps)
    changes = [largest_change(matrix, pattern) for pattern in participation_patterns(steps, bands, most)]
    fitting = min(most, 1 + (steps - bands) // bands)  # full columns
    assert math.sqrt(fitting) - 1e-12 <= max(changes) <= math.sqrt(most) + 1e-12


def test_steps_within_a_band_move_it_further() -> None:
    matrix = dense(coefficients_for(np.ones(12), 4), 12)
    changes = [largest_change(matrix, pattern) for pattern in participation_patterns(12, 3, 2)]
    assert max(changes) > 1.05 * math.sqrt(2)


def test_a_round_has_one_step_of_each_group() -> None:
    bands, steps = 3, 10
    matrix = dense(coefficients_for(np.ones(steps), bands), steps)
    for group in range(bands):
        columns = matrix[:, group::bands]
        entries_of_row = (columns != 0).sum(axis=1)
        assert entries_of_row.max() == 1
        assert np.linalg.norm(columns, axis=0).max() <= 1 + 1e-12


@pytest.mark.parametrize("bands", [1, 2, 7, 16])
@pytest.mark.parametrize("workload", [np.ones(40), MOMENTUM[:40]])
def test_error_is_that_of_dense_matrices(bands: int, workload: Floats) -> None:
    steps = len(workload)
    coefficients = square_root_coefficients(workload, bands)
    product = dense(workload, steps) @ np.linalg.inv(dense(coefficients, steps))
    rows = np.linalg.norm(product, axis=1)
    assert expected_error(coefficients, workload, 1.5) == pytest.approx(1.5 * math.sqrt(np.mean(rows**2)), rel=1e-10)
    scaled = expected_error(3 * coefficients, workload, 1.5)  # a longer column is more sensitive, and less noised
    assert scaled == pytest.approx(expected_error(coefficients, workload, 1.5), rel=1e-12)


@pytest.mark.parametrize("bands", [2, 3, 8])
def test_no_other_coefficients_are_better(bands: int) -> None:
    optimum = coefficients_for(MOMENTUM, bands)
    workload = MOMENTUM
    least = expected_error(optimum, workload)
    square_root = square_root_coefficients(workload, bands)
    assert least < expected_error(square_root, workload)
    assert least < expected_error(coefficients_for(np.ones(60), bands), workload)
    generator = np.random.default_rng(0)
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(20):
            other = optimum + scale * generator.standard_normal(bands)
            assert expected_error(other, workload) >= least * (1 - 1e-9)


@pytest.mark.parametrize("steps", [5, 200, 4000])
def test_more_bands_are_better_before_they_are_accounted_for(steps: int) -> None:
    workload = np.ones(steps)
    last = math.inf
    for bands in (1, 2, 3, 4, 6, 8, 16, 32):
        if bands > steps:
            break
        coefficients = coefficients_for(workload, bands)
        assert coefficients.shape == (bands,)
        assert coefficients.dtype == np.float64
        assert np.linalg.norm(coefficients) == pytest.approx(1, abs=1e-12)
        reached = expected_error(coefficients, workload)
        assert reached <= expected_error(square_root_coefficients(workload, bands), workload) * (1 + 1e-12)
        assert reached < last * (1 + 1e-9)
        last = reached


def test_all_bands_of_the_square_root_are_binomials() -> None:
    steps = 50
    root = square_root_coefficients(np.ones(steps), steps)
    expected = [math.comb(2 * k, k) / 4**k for k in range(steps)]
    np.testing.assert_allclose(root, expected / np.linalg.norm(expected), rtol=1e-12)


@pytest.mark.parametrize("bands", [1, 2, 8, 30])
def test_optimum_of_running_sums_is_jax_privacy_s(bands: int) -> None:
    toeplitz_module = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    steps = 120
    peer = np.asarray(toeplitz_module.optimize_banded_toeplitz(steps, bands), dtype=np.float64)
    ours = coefficients_for(np.ones(steps), bands)
    workload = np.ones(steps)
    assert expected_error(ours, workload) <= expected_error(peer, workload) * (1 + 1e-6)
    np.testing.assert_allclose(ours, peer / np.linalg.norm(peer), atol=5e-3)


@pytest.mark.parametrize("bands", [1, 4, 16])
def test_sensitivity_and_error_are_jax_privacy_s(bands: int) -> None:
    toeplitz_module = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    steps, separation, most = 64, 16, 3
    ours = coefficients_for(np.ones(steps), bands)
    squared = toeplitz_module.minsep_sensitivity_squared(ours, separation, most, steps)
    assert float(squared) == pytest.approx(most, rel=1e-5)
    peer = np.asarray(toeplitz_module.per_query_error(strategy_coef=ours, n=steps))
    workload = np.ones(steps)
    assert expected_error(ours, workload) == pytest.approx(math.sqrt(peer.mean()), rel=1e-4)


def noise_at(epsilon: float, sample_rate: float, steps: int, bands: int) -> float:
    """What cyclic Poisson batches need: as many rounds, at `bands` times the rate."""
    setting = TrainingSetting(
        sample_rate=bands * sample_rate,
        steps=math.ceil(steps / bands),
        epsilon=epsilon,
        delta=1e-5,
    )
    noise_multiplier = solved(setting, "rdp").noise_multiplier
    assert noise_multiplier is not None
    return noise_multiplier


@pytest.mark.parametrize(
    ("epsilon", "bands", "figure"),
    [(8, 12, 0.57), (3, 8, 0.73), (1, 4, 0.94)],
)
def test_gain_at_equal_epsilon_is_as_planned(epsilon: float, bands: int, figure: float) -> None:
    """Figures for 59 batches an epoch and five epochs, which were computed with jax_privacy and the PLD accountant."""
    steps = 5 * 59
    workload = np.ones(steps)
    independent = noise_at(epsilon, 1 / 59, steps, 1) * expected_error(np.ones(1), workload)
    coefficients = coefficients_for(workload, bands)
    banded = noise_at(epsilon, 1 / 59, steps, bands) * expected_error(coefficients, workload)
    assert banded / independent == pytest.approx(figure, abs=0.03)


@pytest.mark.parametrize("bands", [0, 9])
def test_what_cannot_be_factorized_is_refused(bands: int) -> None:
    with pytest.raises(ConfigurationError, match=f"bands={bands} must be at least 1, and at most the 8 steps"):
        coefficients_for(np.ones(8), bands)
