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

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, signal

from dpbench.errors import ConfigurationError

Floats = NDArray[np.float64]
_WORST = 1e3
"""Logarithm of an error that no number holds: of a C whose inverse grows without bound."""


def square_root_coefficients(workload: Floats, bands: int) -> Floats:
    """Coefficients of the banded square root: those of √A, cut off after b and scaled to norm 1.

    Kalinin & Lampert 2024; for running sums the k-th is binomial(2k, k) / 4^k before it is scaled.

    Args:
        workload: First column of A, (n,) with n ≥ b.
        bands: b.

    Returns:
        (b,).

    Raises:
        ConfigurationError: There is no band, or more than steps.

    >>> square_root_coefficients(np.ones(3), 3).round(4).tolist()
    [0.848, 0.424, 0.318]
    """
    if not 1 <= bands <= len(workload):
        raise ConfigurationError(f"bands={bands} must be at least 1, and at most the {len(workload)} steps.")
    coefficients = np.zeros(bands)
    coefficients[0] = math.sqrt(workload[0])
    # The k-th coefficient of c(x)² is that of the workload.
    for k in range(1, bands):
        middle = coefficients[1:k]
        rest = workload[k] - middle @ middle[::-1]
        coefficients[k] = rest / (2 * coefficients[0])
    return coefficients / np.linalg.norm(coefficients)


def coefficients_for(workload: Floats, bands: int, start: Floats | None = None) -> Floats:
    """Coefficients of the banded Toeplitz matrix of norm 1 with the least error for a workload.

    Minimizes log ‖c‖² + log Σ_k w_k β_k² by L-BFGS (McKenna 2024), where β(x) = a(x) / c(x) is the first column of
    A C⁻¹ and w_k the share of rows that contain β_k. An evaluation takes O(n b).

    Args:
        workload: First column of A, (n,).
        bands: b.
        start: Coefficients of fewer bands, perhaps, from which the search begins besides the square root.

    Returns:
        (b,); never with a greater error than the square root's, or than `start`'s.

    Raises:
        ConfigurationError: There are more bands than steps.
    """
    starts = [square_root_coefficients(workload, bands)]
    if start is not None:
        starts.append(np.pad(start, (0, bands - len(start))))
    # The error does not change with the scale of c, so that the first coefficient stays 1.
    candidates = [coefficients[1:] / coefficients[0] for coefficients in starts]

    def objective(rest: Floats) -> tuple[float, Floats]:
        value, gradient = _log_error(np.concatenate([[1.0], rest]), workload)
        return value, gradient[1:]

    def value_of(rest: Floats) -> float:
        return objective(rest)[0]

    if bands > 1:
        solution = optimize.minimize(
            objective,
            min(candidates, key=value_of),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 500, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-9},
        )
        candidates.append(solution.x)
    coefficients = np.concatenate([[1.0], min(candidates, key=value_of)])
    normalized: Floats = coefficients / np.linalg.norm(coefficients)
    return normalized


def expected_error(coefficients: Floats, workload: Floats, noise_multiplier: float = 1.0) -> float:
    """Expected root mean square error of a coordinate of the iterates: z max_t ‖C e_t‖ ‖A C⁻¹‖ / √n.

    Args:
        coefficients: Of C, (b,); [1.0]: independent noise.
        workload: First column of A, (n,): what an optimizer makes of a unit of gradient in so many steps.
        noise_multiplier: z.

    Returns:
        In units of the clipping bound, for sums that are not divided.

    >>> round(expected_error(np.ones(1), np.ones(3), 2.0), 6)
    2.828427
    """
    return noise_multiplier * math.exp(_log_error(coefficients, workload)[0] / 2)


def _log_error(coefficients: Floats, workload: Floats) -> tuple[float, Floats]:
    """Log of the squared error times the squared norm of the longest column, and its gradient, (b,)."""
    steps = len(workload)
    squared_norm = float(coefficients @ coefficients)
    with np.errstate(over="ignore", invalid="ignore"):
        response = signal.lfilter([1.0], coefficients, workload)
        # The derivative of β(x) = a(x) / c(x) by c_j is -x^j β(x) / c(x).
        change = signal.lfilter([1.0], coefficients, response)
        weighted = response * np.arange(steps, 0, -1) / steps
        squared_error = float(weighted @ response)
    if not math.isfinite(squared_error):
        return _WORST, np.zeros(len(coefficients))
    gradient = 2 * coefficients / squared_norm
    for j in range(len(coefficients)):
        gradient[j] -= 2 * (weighted[j:] @ change[: steps - j]) / squared_error
    return math.log(squared_norm) + math.log(squared_error), gradient
