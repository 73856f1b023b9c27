"""Matrix factorizations of correlated noise: coefficients of a banded Toeplitz matrix C, and the error of its noise.

The mechanism releases C G + S z W for the gradients G of all steps, and multiplies by C⁻¹: each step's clipped sum gets
the noise S z (C⁻¹ W)_t, with W independent standard normal numbers. What an optimizer makes of the sums is a linear map
A (running sums, say), so that its iterates have the error S z A C⁻¹ W. C, A and their products are lower triangular
Toeplitz matrices, given by their first columns: multiplication is that of power series.

Sensitivity: C has b bands, so the columns of steps that lie at least b apart have no row in common and are orthogonal.
Let a record take part in at most k steps, any two of them at least b steps apart, with vectors of norm at most S. Then
C G moves by at most S √k max_t ‖C e_t‖ in the Frobenius norm, with equality for k full columns and vectors of norm S.
The columns of the last b - 1 steps are cut off and no longer than the full ones, whose norm is 1 here: so the bound is
S √k, also where gradients depend on earlier releases (Denisov et al. 2022).

Amplification: under cyclic Poisson sampling a record may take part in the steps of its own group only, each b-th. Row
t of C G depends on one step of that group alone, so that each round (b rows) is a Poisson-sampled Gaussian mechanism
with sensitivity at most S and the multiplier z; there are ⌈n / b⌉ rounds, each record once in a round at most.

Sources: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization" (bands, amplification, optimization);
McKenna 2024, "Scaling up the Banded Matrix Factorization Mechanism" (banded Toeplitz matrices, in time n b); Kalinin &
Lampert 2024, "Banded Square Root Matrix Factorization" (square root; workloads of momentum and weight decay).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpbench.errors import ConfigurationError

Floats = NDArray[np.float64]
ErrorKind = Literal["mean", "max"]
"""Of the iterates' error: the root mean square over all steps, or the largest. The error of a lower triangular Toeplitz
matrix grows from row to row, so that the largest is that of the last iterate."""

_WORST = 1e3
"""Logarithm of an error that no number holds: of a C whose inverse grows without bound."""


def square_root_coefficients(bands: int, workload: Floats | None = None) -> Floats:
    """Coefficients of the banded square root: those of √A, cut off after b and scaled to norm 1.

    Kalinin & Lampert 2024; for running sums the k-th is binomial(2k, k) / 4^k before it is scaled.

    Args:
        bands: b.
        workload: First column of A, (n,) with n ≥ b; None: running sums.

    Returns:
        (b,).

    Raises:
        ConfigurationError: There is no band, or more than steps.

    >>> square_root_coefficients(3).round(4).tolist()
    [0.848, 0.424, 0.318]
    """
    if workload is None:
        _check_steps(bands, "bands")
        workload = np.ones(bands)
    _check_bands(bands, len(workload))
    coefficients = np.zeros(bands)
    coefficients[0] = math.sqrt(workload[0])
    # The k-th coefficient of c(x)² is that of the workload.
    for k in range(1, bands):
        middle = coefficients[1:k]
        rest = workload[k] - middle @ middle[::-1]
        coefficients[k] = rest / (2 * coefficients[0])
    return _normalized(coefficients)


def coefficients_for(
    workload: Floats,
    bands: int,
    error: ErrorKind = "mean",
    start: Floats | None = None,
) -> Floats:
    """Coefficients of the banded Toeplitz matrix of norm 1 with the least error for a workload.

    Minimizes log ‖c‖² + log Σ_k w_k β_k² by L-BFGS (McKenna 2024), where β(x) = a(x) / c(x) is the first column of
    A C⁻¹ and w_k the share of rows that contain β_k, or 1 for the last row. An evaluation takes O(n b).

    Args:
        workload: First column of A, (n,).
        bands: b.
        error: What is the least.
        start: Coefficients of fewer bands, perhaps, from which the search begins besides the square root.

    Returns:
        (b,); never with a greater error than the square root's, or than `start`'s.

    Raises:
        ConfigurationError: There are more bands than steps.
    """
    from scipy import optimize

    _check_bands(bands, len(workload))
    weights = _row_weights(len(workload), error)
    starts = [square_root_coefficients(bands, workload)]
    if start is not None:
        padding = np.zeros(bands - len(start))
        starts.append(np.concatenate([start, padding]))

    def objective(rest: Floats) -> tuple[float, Floats]:
        # The error does not change with the scale of c, so that the first coefficient stays 1.
        coefficients = np.concatenate([[1.0], rest])
        value, gradient = _log_error(coefficients, workload, weights)
        return value, gradient[1:]

    candidates = []
    for coefficients in starts:
        rest = coefficients[1:] / coefficients[0]
        candidates.append(rest)
    first = min(candidates, key=lambda rest: objective(rest)[0])
    if bands == 1:
        return np.ones(1)
    solution = optimize.minimize(
        objective,
        first,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 500, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-9},
    )
    candidates.append(solution.x)
    best = min(candidates, key=lambda rest: objective(rest)[0])
    return _normalized(np.concatenate([[1.0], best]))


def expected_error(
    coefficients: Floats,
    workload: Floats,
    noise_multiplier: float = 1.0,
    error: ErrorKind = "mean",
) -> float:
    """Expected root mean square error of a coordinate of the iterates: z max_t ‖C e_t‖ ‖A C⁻¹‖.

    Args:
        coefficients: Of C, (b,); [1.0]: independent noise.
        workload: First column of A, (n,): what an optimizer makes of a unit of gradient in so many steps.
        noise_multiplier: z.
        error: The norm of A C⁻¹: root mean square of its rows' norms, or the largest of them.

    Returns:
        In units of the clipping bound, for sums that are not divided.

    >>> round(expected_error(np.ones(1), np.ones(100), 2.0, "max"), 6)
    20.0
    """
    weights = _row_weights(len(workload), error)
    value, _ = _log_error(np.asarray(coefficients, dtype=np.float64), workload, weights)
    return noise_multiplier * math.exp(value / 2)


def noise_coefficients(coefficients: Floats, steps: int) -> Floats:
    """First column of C⁻¹: how a step's independent noise goes on in the noise of the following steps, (n,).

    >>> noise_coefficients(np.array([1.0, 0.5]), 4).tolist()
    [1.0, -0.5, 0.25, -0.125]
    """
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return _filtered(np.ones(1), coefficients, impulse)


def relative_noise_stds(coefficients: Floats, steps: int) -> Floats:
    """Norm of each row of C⁻¹: standard deviation of each step's own noise, over that of independent noise, (n,).

    It grows with the steps: noise that cancels in sums over steps is larger in each of them.

    >>> relative_noise_stds(np.array([0.8, 0.6]), 3).round(4).tolist()
    [1.25, 1.5625, 1.7134]
    """
    column = noise_coefficients(coefficients, steps)
    return np.sqrt(np.cumsum(column**2))


def _log_error(
    coefficients: Floats,
    workload: Floats,
    weights: Floats,
) -> tuple[float, Floats]:
    """Log of the squared error times the squared norm of the longest column, and its gradient, (b,)."""
    squared_norm = float(coefficients @ coefficients)
    with np.errstate(over="ignore", invalid="ignore"):
        response = _filtered(np.ones(1), coefficients, workload)
        weighted = weights * response
        squared_error = float(weighted @ response)
    if not math.isfinite(squared_error):
        return _WORST, np.zeros(len(coefficients))
    # The derivative of β(x) = a(x) / c(x) by c_j is -x^j β(x) / c(x).
    with np.errstate(over="ignore", invalid="ignore"):
        change = _filtered(np.ones(1), coefficients, response)
    steps = len(workload)
    gradient = 2 * coefficients / squared_norm
    for j in range(len(coefficients)):
        gradient[j] -= 2 * (weighted[j:] @ change[: steps - j]) / squared_error
    value = math.log(squared_norm) + math.log(squared_error)
    return value, gradient


def _filtered(numerator: Floats, denominator: Floats, series: Floats) -> Floats:
    """numerator(x) / denominator(x) × series(x), to the length of the series."""
    from scipy import signal

    filtered: Floats = signal.lfilter(numerator, denominator, series)
    return filtered


def _row_weights(steps: int, error: ErrorKind) -> Floats:
    """Share of the rows that contain the k-th number of a Toeplitz matrix's first column, (n,)."""
    kinds = get_args(ErrorKind)
    if error not in kinds:
        raise ConfigurationError(f"unknown error {error!r}; known are {', '.join(kinds)}.")
    if error == "max":
        return np.ones(steps)
    rows = np.arange(steps, 0, -1)
    return rows / steps


def _normalized(coefficients: Floats) -> Floats:
    norm = np.linalg.norm(coefficients)
    return coefficients / norm


def _check_steps(steps: int, name: str = "steps") -> None:
    if steps < 1:
        raise ConfigurationError(f"{name} must be a positive number, not {steps}.")


def _check_bands(bands: int, steps: int) -> None:
    _check_steps(bands, "bands")
    if bands > steps:
        raise ConfigurationError(f"bands={bands} are more than the {steps} steps: set fewer bands, or train longer.")
