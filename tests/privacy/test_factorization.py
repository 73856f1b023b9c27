"""Banded Toeplitz factorizations: against dense matrices, all patterns of participation, and jax_privacy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.privacy.mechanism.factorization import (
    ErrorKind,
    Floats,
    bands_to_try,
    choose_bands,
    coefficients_for,
    expected_error,
    noise_coefficients,
    optimized_coefficients,
    optimizer_workload,
    relative_noise_stds,
    square_root_coefficients,
)

MOMENTUM_AND_DECAY = {"learning_rate": 0.5, "momentum": 0.9, "weight_decay": 0.02}
ERRORS: tuple[ErrorKind, ...] = ("mean", "max")


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
    matrix = dense(optimized_coefficients(steps, bands), steps)
    changes = [largest_change(matrix, pattern) for pattern in participation_patterns(steps, bands, most)]
    fitting = min(most, 1 + (steps - bands) // bands)  # full columns
    assert math.sqrt(fitting) - 1e-12 <= max(changes) <= math.sqrt(most) + 1e-12


def test_steps_within_a_band_move_it_further() -> None:
    matrix = dense(optimized_coefficients(12, 4), 12)
    changes = [largest_change(matrix, pattern) for pattern in participation_patterns(12, 3, 2)]
    assert max(changes) > 1.05 * math.sqrt(2)


def test_a_round_has_one_step_of_each_group() -> None:
    bands, steps = 3, 10
    matrix = dense(optimized_coefficients(steps, bands), steps)
    for group in range(bands):
        columns = matrix[:, group::bands]
        entries_of_row = (columns != 0).sum(axis=1)
        assert entries_of_row.max() == 1
        assert np.linalg.norm(columns, axis=0).max() <= 1 + 1e-12


@pytest.mark.parametrize("bands", [1, 2, 7, 16])
@pytest.mark.parametrize("workload", [optimizer_workload(40), optimizer_workload(40, **MOMENTUM_AND_DECAY)])
def test_error_is_that_of_dense_matrices(bands: int, workload: Floats) -> None:
    steps = len(workload)
    coefficients = square_root_coefficients(bands, workload)
    product = dense(workload, steps) @ np.linalg.inv(dense(coefficients, steps))
    rows = np.linalg.norm(product, axis=1)
    assert expected_error(coefficients, workload, 1.5) == pytest.approx(1.5 * math.sqrt(np.mean(rows**2)), rel=1e-10)
    assert expected_error(coefficients, workload, 1.5, "max") == pytest.approx(1.5 * rows.max(), rel=1e-10)
    scaled = expected_error(3 * coefficients, workload, 1.5)  # a longer column is more sensitive, and less noised
    assert scaled == pytest.approx(expected_error(coefficients, workload, 1.5), rel=1e-12)


def test_noise_of_a_step_is_the_inverse() -> None:
    coefficients = optimized_coefficients(30, 5)
    inverse = dense(noise_coefficients(coefficients, 30), 30)
    np.testing.assert_allclose(inverse @ dense(coefficients, 30), np.eye(30), atol=1e-12)
    np.testing.assert_allclose(relative_noise_stds(coefficients, 30), np.linalg.norm(inverse, axis=1), rtol=1e-12)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_workload_is_what_sgd_does(momentum: float, weight_decay: float, nesterov: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    options = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    optimizer = torch.optim.SGD([weight], lr=0.3, **options)
    moved = []
    for step in range(20):
        weight.grad = torch.full_like(weight, float(step == 0))
        optimizer.step()
        moved.append(-weight.item())
    workload = optimizer_workload(20, learning_rate=0.3, **options)
    np.testing.assert_allclose(workload, moved, rtol=1e-12)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("bands", [2, 3, 8])
def test_no_other_coefficients_are_better(bands: int, error: ErrorKind) -> None:
    workload = optimizer_workload(60, **MOMENTUM_AND_DECAY)
    optimum = optimized_coefficients(60, bands, error=error, **MOMENTUM_AND_DECAY)
    least = expected_error(optimum, workload, error=error)
    square_root = square_root_coefficients(bands, workload)
    assert least < expected_error(square_root, workload, error=error)
    assert least < expected_error(optimized_coefficients(60, bands, error=error), workload, error=error)
    generator = np.random.default_rng(0)
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(20):
            other = optimum + scale * generator.standard_normal(bands)
            assert expected_error(other, workload, error=error) >= least * (1 - 1e-9)


@pytest.mark.parametrize("steps", [5, 200, 4000])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("error", ERRORS)
def test_more_bands_are_better_before_they_are_accounted_for(steps: int, momentum: float, error: ErrorKind) -> None:
    workload = optimizer_workload(steps, momentum=momentum)
    last = math.inf
    for bands in bands_to_try(min(steps, 32)):
        coefficients = coefficients_for(workload, bands, error)
        assert coefficients.shape == (bands,)
        assert coefficients.dtype == np.float64
        assert np.linalg.norm(coefficients) == pytest.approx(1, abs=1e-12)
        reached = expected_error(coefficients, workload, error=error)
        assert reached <= expected_error(square_root_coefficients(bands), workload, error=error) * (1 + 1e-12)
        assert reached < last * (1 + 1e-9)
        last = reached


def test_all_bands_are_the_known_optimum() -> None:
    """With as many bands as steps the last iterate's optimum is the square root (Fichtenberger et al. 2022)."""
    steps = 50
    root = square_root_coefficients(steps)
    ones = optimizer_workload(steps)
    expected = [math.comb(2 * k, k) / 4**k for k in range(steps)]
    np.testing.assert_allclose(root, expected / np.linalg.norm(expected), rtol=1e-12)
    optimum = optimized_coefficients(steps, steps, error="max")
    np.testing.assert_allclose(optimum, root, atol=1e-4)
    # ‖A C⁻¹‖ ‖C‖ is then the squared norm of the square root's first column.
    assert expected_error(optimum, ones, error="max") == pytest.approx(np.sum(np.square(expected)), rel=1e-8)


@pytest.mark.parametrize("bands", [1, 2, 8, 30])
def test_optimum_of_running_sums_is_jax_privacy_s(bands: int) -> None:
    toeplitz_module = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    steps = 120
    peer = np.asarray(toeplitz_module.optimize_banded_toeplitz(steps, bands), dtype=np.float64)
    ours = optimized_coefficients(steps, bands)
    workload = optimizer_workload(steps)
    assert expected_error(ours, workload) <= expected_error(peer, workload) * (1 + 1e-6)
    np.testing.assert_allclose(ours, peer / np.linalg.norm(peer), atol=5e-3)


@pytest.mark.parametrize("bands", [1, 4, 16])
def test_sensitivity_and_error_are_jax_privacy_s(bands: int) -> None:
    toeplitz_module = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    steps, separation, most = 64, 16, 3
    ours = optimized_coefficients(steps, bands)
    squared = toeplitz_module.minsep_sensitivity_squared(ours, separation, most, steps)
    assert float(squared) == pytest.approx(most, rel=1e-5)
    peer = np.asarray(toeplitz_module.per_query_error(strategy_coef=ours, n=steps))
    workload = optimizer_workload(steps)
    assert expected_error(ours, workload) == pytest.approx(math.sqrt(peer.mean()), rel=1e-4)
    assert expected_error(ours, workload, error="max") == pytest.approx(math.sqrt(peer.max()), rel=1e-4)


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
    workload = optimizer_workload(steps)
    independent = noise_at(epsilon, 1 / 59, steps, 1) * expected_error(np.ones(1), workload)
    coefficients = coefficients_for(workload, bands)
    banded = noise_at(epsilon, 1 / 59, steps, bands) * expected_error(coefficients, workload)
    assert banded / independent == pytest.approx(figure, abs=0.03)


def test_bands_are_chosen_under_their_accounting() -> None:
    steps = 5 * 59
    workload = optimizer_workload(steps)

    tried = bands_to_try(16)
    noises = {bands: noise_at(3, 1 / 59, steps, bands) for bands in tried}
    noise = noises.__getitem__
    best = choose_bands(noise, workload, tried)
    errors = {}
    for bands in tried:
        errors[bands] = expected_error(coefficients_for(workload, bands), workload, noise(bands))
    assert best.bands == min(errors, key=lambda bands: errors[bands])
    assert best.error == pytest.approx(errors[best.bands], rel=1e-6)
    assert len(best.coefficients) == best.bands
    assert best.noise_multiplier == noise(best.bands)


def test_bands_that_cost_more_than_they_cancel_are_not_chosen() -> None:
    best = choose_bands(lambda bands: 1.0 * bands, optimizer_workload(100), bands_to_try(32))
    assert best.bands == 1
    np.testing.assert_array_equal(best.coefficients, [1.0])


def test_what_cannot_be_factorized_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="bands=9 are more than the 8 steps: set fewer bands"):
        optimized_coefficients(8, 9)
    with pytest.raises(ConfigurationError, match="bands must be a positive number, not 0"):
        square_root_coefficients(0)
    with pytest.raises(ConfigurationError, match="steps must be a positive number, not 0"):
        optimizer_workload(0)
    with pytest.raises(ConfigurationError, match="momentum must be at least 0 and less than 1, not 1.0"):
        optimizer_workload(8, momentum=1.0)
    with pytest.raises(ConfigurationError, match="learning_rate must be a positive number, not 0"):
        optimizer_workload(8, learning_rate=0.0)
    with pytest.raises(ConfigurationError, match="× weight_decay must be at least 0 and less than 1, not 2"):
        optimizer_workload(8, learning_rate=2.0, weight_decay=1.0)
    with pytest.raises(ConfigurationError, match="unknown error 'least'; known are mean, max"):
        expected_error(np.ones(1), np.ones(3), error="least")  # type: ignore[arg-type]
