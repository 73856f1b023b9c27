"""Adaptive clipping at a quantile of the norms (adaptive_quantile_clipping_2021)."""

from __future__ import annotations

from typing import Literal

from dpbench.callback.strategy import PrivateStrategy
from dpbench.options import Positive
from dpbench.privacy.mechanism.adaptive import QuantileBounds
from dpbench.privacy.mechanism.plan import NoiseAllocation
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.strategies.dpsgd import Clipping, groups_by


class AdaptiveQuantileClipping(PrivateStrategy):
    r"""DP-SGD with a bound that tracks the γ-quantile of the records' norms, by noisy counts of those below it.

    .. math:: C_{t+1} = C_t \exp(-\eta_C(\tilde b_t - \gamma))

    where :math:`\tilde b_t` is the noised share of records with a norm of at most C_t
    (`privacy.mechanism.adaptive.QuantileBounds`).

    Guarantee: that of `DPSGD` with the same `noise_multiplier` z. The counts, centered at ½, cost a part of it; the
    gradients get :math:`z_\Delta = (z^{-2} - \sum (2\sigma_b)^{-2})^{-1/2}` (Theorem 1; one term for each group).

    Args:
        quantile: γ, the share of records that should not be clipped.
        clip_learning_rate: η_C.
        initial_max_grad_norm: C_0; with several groups the norm of all bounds together.
        update: "geometric" or "linear".
        count_noise_std: σ_b on the sum of the bits; None takes m/20, m the expected number of records in a batch.
        clipping: Grouping, as for `DPSGD`: one bound for all, or one for each layer, ...
        allocation: How noise is shared among groups; "proportional" gives each noise in proportion to its bound.
    """

    quantile: float = 0.5
    clip_learning_rate: float = 0.2
    initial_max_grad_norm: Positive = 0.1
    update: Literal["geometric", "linear"] = "geometric"
    count_noise_std: float | None = None
    clipping: Clipping = "flat"
    allocation: NoiseAllocation = "proportional"

    def design(self) -> Recipe:
        """Groups by `clipping`, which start at C_0."""
        adaptation = QuantileBounds(self.quantile, self.clip_learning_rate, self.update, self.count_noise_std)
        groups = groups_by(self.clipping, self.initial_max_grad_norm)
        return Recipe(groups, allocation=self.allocation, adaptation=adaptation)
