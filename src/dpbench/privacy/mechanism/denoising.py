"""Independent error correction of a released gradient (gradient_compression_denoising_2020, Algorithm 3).

Post-processing: it reads the noised sum and public numbers (noise, threshold, priors, expected batch size), so that it
costs no privacy and touches no ledger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.special import log_ndtr

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients.discretization import check_threshold

Hypotheses = Literal["points", "intervals", "uniform"]
Scale = Literal["sum", "mean"]
Estimate = Literal["mode", "mean"]
Priors = tuple[float, float, float]

_EQUAL: Priors = (1 / 3, 1 / 3, 1 / 3)


@dataclass(frozen=True)
class ErrorCorrection:
    r"""Replace each coordinate y of a noisy gradient by −ν, 0 or +ν, whichever hypothesis is the most probable.

    With :math:`Y = X + Z`, :math:`Z \sim \mathcal N(0, \sigma^2)`, the hypotheses are D: X < −ν, S: |X| ≤ ν, U: X > ν,
    and the score of a hypothesis is its prior times the likelihood of y. The paper leaves the likelihood open:

    * "points": X is −ν, 0 or +ν exactly; φ((y + ν)/σ), φ(y/σ), φ((y − ν)/σ). With equal priors: the sign of y
      where |y| > ν/2.
    * "intervals": not normalized; the mass that N(y, σ²) has in each interval: Φ((−ν − y)/σ),
      Φ((ν − y)/σ) − Φ((−ν − y)/σ), Φ((y − ν)/σ).
    * "uniform": X uniform within its interval, and |X| ≤ B: the masses above, cut at ±B, divided by the widths B − ν,
      2ν and B − ν. B is the largest clipped sum for the expected number of records.

    It also leaves open the quantity that ν is compared with:

    * "sum": y is the noisy sum, and the corrected sum is the update, undivided (Algorithm 1 to the letter); the
      learning rate has to match.
    * "mean": y is the noisy mean over the expected number of records.

    The estimate is the paper's, the most probable of −ν, 0 and +ν ("mode"), or their posterior "mean",
    ν (P(U | y) − P(D | y)), which has the least squared error if the hypotheses are right.

    Attributes:
        threshold: ν > 0.
        hypotheses: The likelihood, as above.
        scale: "sum" or "mean".
        priors: Probabilities of (D, S, U); see `estimate_priors` for public data. None takes equal ones.
        estimate: "mode" or "mean".

    Raises:
        ConfigurationError: ν is not positive, or the priors do not sum to 1.
    """

    threshold: float
    hypotheses: Hypotheses = "points"
    scale: Scale = "sum"
    priors: Sequence[float] | None = None
    estimate: Estimate = "mode"

    def __post_init__(self) -> None:
        check_threshold(self.threshold, "correction_threshold")
        if not self.threshold:
            raise ConfigurationError("correction_threshold must be positive (null for no error correction).")
        for name, choices in (("hypotheses", Hypotheses), ("scale", Scale), ("estimate", Estimate)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigurationError(
                    f"unknown correction_{name} {getattr(self, name)!r}; known are {', '.join(get_args(choices))}."
                )
        check_priors(self.priors)

    def check(self, bound: float, expected_records: float) -> None:
        """Raise ConfigurationError if ν is more than a gradient can be.

        Args:
            bound: Smallest bound of a coordinate of one record.
            expected_records: Expected number of records in a batch.
        """
        largest = bound
        if self.scale == "sum":
            largest = bound * expected_records
        if self.hypotheses == "uniform" and largest <= self.threshold:
            raise ConfigurationError(
                f"correction_threshold={self.threshold} is not below {largest:.4g}, the most that the gradient can be "
                "in any coordinate: choose a smaller one."
            )

    def correct(
        self,
        total: Tensor,
        noise_std: float,
        expected_records: float,
        bound: float,
    ) -> Tensor:
        """The corrected gradient.

        Args:
            total: Noisy sum over a batch, any shape.
            noise_std: σ of the noise on each coordinate of the sum.
            expected_records: Expected number of records in a batch.
            bound: Most that one record adds to a coordinate.

        Returns:
            −ν, 0 or +ν for each coordinate, or a value between −ν and +ν (posterior mean), in the shape of `total`.
        """
        divisor = 1.0
        if self.scale == "mean":
            divisor = expected_records
        largest = bound * expected_records / divisor
        down, stop, up = self._scores(
            total / divisor,
            std=noise_std / divisor,
            largest=largest,
        )
        if self.estimate == "mean":
            posterior = torch.stack([down, stop, up]).softmax(0)
            difference: Tensor = posterior[2] - posterior[0]
            return difference.mul_(self.threshold)
        # Where two hypotheses are equally probable, the coordinate becomes 0.
        is_up = (up > down) & (up > stop)
        is_down = (down > up) & (down > stop)
        corrected: Tensor = is_up.to(total.dtype) - is_down.to(total.dtype)
        return corrected.mul_(self.threshold)

    def _scores(
        self,
        y: Tensor,
        std: float,
        largest: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log of prior times likelihood of (D, S, U), up to a common constant, each in the shape of `y`.

        Args:
            y: Noisy sum or mean, as ν is compared with.
            std: σ of the noise on it.
            largest: B, on the scale of `y`.
        """
        nu = self.threshold
        priors = self.priors or _EQUAL
        log_down, log_stop, log_up = [_log(prior) for prior in priors]
        if self.hypotheses == "points":
            # The exponents of φ without −y²/2σ², which all three have.
            variance = std**2
            shift = nu * y / variance
            half = nu**2 / (2 * variance)
            down = log_down - shift - half
            stop = torch.full_like(y, log_stop)
            up = log_up + shift - half
            return down, stop, up
        edge = math.inf
        if self.hypotheses == "uniform":
            if largest <= nu:
                # An adaptive bound fell below ν: no coordinate can be above it.
                impossible = torch.full_like(y, -math.inf)
                return impossible, torch.zeros_like(y), impossible
            edge = largest
            log_width = math.log(largest - nu)
            log_down -= log_width
            log_stop -= math.log(2 * nu)
            log_up -= log_width
        at_minus_nu = (-nu - y) / std
        at_nu = (nu - y) / std
        below = _log_mass((-edge - y) / std, at_minus_nu)
        inside = _log_mass(at_minus_nu, at_nu)
        # In the mirrored tail, where the two Φ do not both round to 1.
        above = _log_mass((y - edge) / std, (y - nu) / std)
        down = log_down + below
        stop = log_stop + inside
        up = log_up + above
        return down, stop, up


def _log(probability: float) -> float:
    return math.log(probability) if probability else -math.inf


def _log_mass(low: Tensor, high: Tensor) -> Tensor:
    """log(Φ(high) − Φ(low)), low < high; accurate in both tails."""
    # In the upper tail both Φ round to 1; there Φ(h) − Φ(l) = Φ(−l) − Φ(−h).
    flip = low > 0
    lower = torch.where(flip, -high, low)
    upper = torch.where(flip, -low, high)
    log_upper = log_ndtr(upper)
    log_lower = log_ndtr(lower)
    log_ratio = (log_lower - log_upper).clamp(max=0)
    mass: Tensor = log_upper + torch.log1p(-torch.exp(log_ratio))
    return mass


def check_priors(priors: Sequence[float] | None) -> None:
    """Raise ConfigurationError unless None or three probabilities that sum to 1."""
    if priors is None:
        return
    if len(priors) != 3 or min(priors) < 0 or not math.isclose(sum(priors), 1, abs_tol=1e-6):
        raise ConfigurationError(
            f"priors must be three probabilities [p_down, p_stop, p_up] that sum to 1, not {list(priors)}."
        )


def estimate_priors(gradients: Tensor, threshold: float) -> Priors:
    """Priors: how often the coordinates of *public* gradients fall under each hypothesis.

    Args:
        gradients: Clipped sums (or means, the quantity that ν is compared with) from public data, any shape. Never pass
            gradients of private data: nothing is noised here.
        threshold: ν.

    Returns:
        (p_down, p_stop, p_up): frequencies, with one half added to each count, so that none is impossible (Jeffreys'
        prior; the maximum likelihood of the paper for any number of coordinates that matters).

    Raises:
        ConfigurationError: There are no coordinates, or some are not finite.
    """
    if not gradients.numel() or not gradients.isfinite().all():
        raise ConfigurationError("priors need finite gradients of public data.")
    down = int((gradients < -threshold).sum())
    up = int((gradients > threshold).sum())
    stop = gradients.numel() - down - up
    total = gradients.numel() + 1.5
    return (down + 0.5) / total, (stop + 0.5) / total, (up + 0.5) / total
