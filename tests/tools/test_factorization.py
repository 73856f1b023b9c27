"""Banded Toeplitz factorizations: against dense matrices and jax_privacy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dpbench.errors import ConfigurationError
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


@pytest.mark.parametrize(("bands", "workload"), [(1, MOMENTUM), (7, np.ones(40))])
def test_error_is_that_of_dense_matrices(bands: int, workload: Floats) -> None:
    steps = len(workload)
    coefficients = square_root_coefficients(workload, bands)
    product = dense(workload, steps) @ np.linalg.inv(dense(coefficients, steps))
    rows = np.linalg.norm(product, axis=1)
    assert expected_error(coefficients, workload, 1.5) == pytest.approx(1.5 * math.sqrt(np.mean(rows**2)), rel=1e-10)
    scaled = expected_error(3 * coefficients, workload, 1.5)  # a longer column is more sensitive, and less noised
    assert scaled == pytest.approx(expected_error(coefficients, workload, 1.5), rel=1e-12)


@pytest.mark.parametrize("bands", [0, 9])
def test_what_cannot_be_factorized_is_refused(bands: int) -> None:
    with pytest.raises(ConfigurationError, match=f"bands={bands} must be at least 1, and at most the 8 steps"):
        coefficients_for(np.ones(8), bands)
