"""Noise that is correlated over a few steps: banded matrix factorization.

Step t adds S·z·n_t to its clipped sum, with n = C⁻¹w, where w is independent standard normal noise and C
is lower triangular, banded and Toeplitz. The noise of a step takes back a part of that of the steps before, so that
running sums of releases, which an optimizer makes of them, carry less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.noise import add_on_grid, standard_normal
from dpbench.privacy.mechanism.noise_process import Gaussian, Keys, Noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.privacy.sampling import Sampling


@dataclass(frozen=True)
class Banded:
    """Options of noise that is correlated over b steps; an entry point of `dpbench.noises`.

    Attributes:
        bands: b; 1 is independent noise.
    """

    bands: int

    def __post_init__(self) -> None:
        if type(self.bands) is not int or self.bands < 1:
            raise ConfigurationError(f"bands must be a whole number of at least 1, not {self.bands!r}.")

    @property
    def coefficients(self) -> tuple[float, ...]:
        """First column of C, c_0 to c_{b−1}: that of the square root of running sums, cut off after b, of norm 1.

        (Kalinin & Lampert 2024.) The k-th is binomial(2k, k) / 4^k before it is scaled.

        >>> [round(c, 4) for c in Banded(bands=2).coefficients]
        [0.8944, 0.4472]
        """
        coefficients = np.ones(self.bands)
        # The k-th coefficient of c(x)² is that of running sums, 1.
        for k in range(1, self.bands):
            middle = coefficients[1:k]
            coefficients[k] = (1 - middle @ middle[::-1]) / 2
        return tuple((coefficients / np.linalg.norm(coefficients)).tolist())

    def __call__(self, noise_multiplier: float, factors: Factors) -> Noise:
        """Make noise with these coefficients: independent where there is one.

        Raises:
            ConfigurationError: The multiplier moves.
        """
        if factors:
            raise ConfigurationError(
                "banded noise needs the same noise in each step: leave out noise_schedule, or set "
                "strategy.noise=gaussian."
            )
        if self.bands == 1:
            return Gaussian(noise_multiplier)
        return BandedNoise(noise_multiplier, self.coefficients)


@dataclass
class _Cache:
    """The noise of the last b − 1 steps, that of step t in row t mod (b − 1), in units of the standard deviations.

    Attributes:
        size: Number of coordinates.
        rows: Shape (b − 1, size); None before the first step.
        step: The step that comes next.
    """

    size: int
    rows: Tensor | None = field(default=None, repr=False)
    step: int = 0


@lru_cache(maxsize=8)
def _relative_stds(coefficients: tuple[float, ...], steps: int) -> NDArray[np.float64]:
    """Norm of each row of C⁻¹: standard deviation of each step's own noise, over that of independent noise, (n,).

    It grows with the steps: noise that cancels in sums over steps is larger in each of them.
    """
    from scipy import signal

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    column = signal.lfilter(np.ones(1), np.array(coefficients), impulse)
    stds: NDArray[np.float64] = np.sqrt(np.cumsum(column**2))
    return stds


@dataclass(frozen=True)
class BandedNoise(Noise):
    """n_t = (w_t − Σ_{k=1}^{b−1} c_k n_{t−k}) / c_0, where w_t is a function of the key of step t.

    Guarantee: with batches that hold a record at most once in b steps, a record moves the whitened releases
    C·(releases) by c_0 x, ..., c_{b−1} x in b steps that no other participation of it touches, and so by at most
    S‖c‖₂ = S each time that it takes part, adaptively chosen sums included (Denisov et al. 2022; Choquette-Choo et al.
    2023). Each participation costs as much as with independent noise of multiplier z. A prefix of the steps is the
    leading submatrix.

    The recursion is carried out in the precision of the sums: C·n differs from w by 10^-7 of it, a function of earlier
    noise alone, so that a record's shift is off by as little. A release is the sum plus n_t, in float64, rounded to the
    grid of `noise`; n_t is kept in float32, so that a cell has its Gaussian probability but for some 10^-5 of it, where
    independent noise has 10^-6.

    Attributes:
        noise_multiplier: z.
        coefficients: c_0 > 0 to c_{b−1}, b ≥ 2, of norm 1.
    """

    noise_multiplier: float
    coefficients: tuple[float, ...]

    @property
    def whitening(self) -> tuple[float, ...]:
        """First column of C."""
        return self.coefficients

    @property
    def vectors(self) -> int:
        """Number of vectors like the sum that are kept."""
        return self.bands - 1

    def multiplier(self, step: int) -> float:
        """Noise multiplier z."""
        return self.noise_multiplier

    def relative_std(self, step: int) -> float:
        """Norm of row t of C⁻¹: noise that cancels in sums over steps is larger in each of them."""
        # In powers of two, so that the rows are computed once for many steps.
        length = max(1024, 1 << step.bit_length())
        return float(_relative_stds(self.coefficients, length)[step])

    @property
    def constant(self) -> bool:
        """True: the cost of a step follows from the sampling."""
        return True

    @property
    def independent(self) -> bool:
        """False: the noise of a step depends on that of earlier ones."""
        return False

    def init(self, size: int) -> _Cache:
        """An empty cache; memory is taken where noise is added, which one process does."""
        return _Cache(size)

    def add_(
        self,
        total: Tensor,
        plan: ReleasePlan,
        step: int,
        keys: Keys,
        state: _Cache,
    ) -> Tensor:
        """Add n_t; where the cache is that of another step, all noise since step 0 is drawn again first."""
        rows = state.rows
        if rows is None:
            rows = torch.zeros(self.vectors, state.size, dtype=total.dtype, device=total.device)
            state.rows = rows
        if state.step != step:
            rows.zero_()
            for earlier in range(step):
                self._advance(rows, total, earlier, keys(earlier))
        noise = self._advance(rows, total, step, keys(step))
        state.step = step + 1
        return add_on_grid(total, plan.segments, noise)

    def _advance(
        self,
        rows: Tensor,
        total: Tensor,
        step: int,
        key: Sequence[int],
    ) -> Tensor:
        """Put the noise of a step in the place of the oldest.

        Args:
            rows: Rows of the cache.
            total: Tensor with the shape and device of the noise.
            step: Step of the noise.
            key: Key of the step.

        Returns:
            Its row.
        """
        noise = standard_normal(total, key)
        product = torch.empty_like(noise)
        # Products and differences are rounded one by one: fused, the result would depend on how a processor divides a
        # vector, and a resumed run on another number of threads would add other noise.
        for lag in range(1, min(step, self.vectors) + 1):
            torch.mul(rows[(step - lag) % self.vectors], self.coefficients[lag], out=product)
            noise.sub_(product)
        oldest = rows[step % self.vectors]
        torch.div(noise, self.coefficients[0], out=oldest)
        return oldest

    def begin(self, sampling: Sampling, steps: float) -> None:
        """Refuse a training that is shorter than a round."""
        if self.bands > steps:
            raise ConfigurationError(
                f"{self.bands} bands are more than the {steps:.0f} steps of the training: lower strategy.bands."
            )

    def to_dict(self) -> dict[str, Any]:
        """Multiplier and coefficients; a subclass is stated by its name, as for `Gaussian`."""
        if type(self) is not BandedNoise:
            return super().to_dict()
        return {
            "process": "banded",
            "noise_multiplier": float(self.noise_multiplier),
            "coefficients": list(self.coefficients),
        }
