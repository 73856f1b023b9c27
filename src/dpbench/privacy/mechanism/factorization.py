"""Coefficients of banded Toeplitz strategies of matrix factorization."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def square_root_coefficients(bands: int) -> NDArray[np.float64]:
    """First coefficients of the square root of the matrix of running sums, scaled to norm 1.

    c_k = binom(2k, k) / 4^k before scaling (Henzinger, Upadhyay & Upadhyay 2023).

    Args:
        bands: Number of coefficients, from 1 on.

    Returns:
        Shape (bands,), positive and decreasing.

    >>> square_root_coefficients(2)
    array([0.89442719, 0.4472136 ])
    """
    ratios = (np.arange(1, bands) - 0.5) / np.arange(1, bands)
    coefficients = np.concatenate([[1.0], np.cumprod(ratios)])
    return np.asarray(coefficients / np.linalg.norm(coefficients))
