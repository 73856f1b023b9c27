"""Adaptive clipping at a quantile of the norms (adaptive_quantile_clipping_2021)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from dpbench.privacy.adaptive import QuantileBounds
from dpbench.privacy.clipping import VectorGroup
from dpbench.privacy.engine import PerRecordEngine
from dpbench.privacy.plan import NoiseAllocation
from dpbench.strategies.base import PrivateStrategy
from dpbench.strategies.dpsgd import Clipping, check_bound, check_clipping, groups_by


class AdaptiveQuantileClipping(PrivateStrategy):
    r"""DP-SGD whose bound tracks the γ-quantile of the records' norms, by noisy counts of those below it.

    .. math:: C_{t+1} = C_t \exp(-\eta_C(\tilde b_t - \gamma))

    where :math:`\tilde b_t` is the noised share of records with a norm of at most C_t
    (`privacy.adaptive.QuantileBounds`).

    Guarantee: that of `DPSGD` with the same `noise_multiplier` z. The counts, centred at ½, cost a part of it; the
    gradients get :math:`z_\Delta = (z^{-2} - \sum (2\sigma_b)^{-2})^{-1/2}` (Theorem 1; one term for each group).

    Args:
        quantile: γ, the share of records that should not be clipped.
        clip_learning_rate: η_C.
        initial_max_grad_norm: C_0; with several groups the norm of all bounds together.
        update: "geometric" or "linear".
        count_noise_std: σ_b on the sum of the bits; None takes m/20, m the expected number of records in a lot.
        clipping: As for `DPSGD`: one bound for all, or one for each layer, ...
        allocation: How noise is shared among groups; "proportional" gives each noise in proportion to its bound.
        **options: See `PrivateStrategy`.
    """

    def __init__(
        self,
        quantile: float = 0.5,
        clip_learning_rate: float = 0.2,
        initial_max_grad_norm: float = 0.1,
        update: Literal["geometric", "linear"] = "geometric",
        count_noise_std: float | None = None,
        clipping: Clipping = "flat",
        allocation: NoiseAllocation = "proportional",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_clipping(clipping)
        self.clipping = clipping
        self.initial_max_grad_norm = check_bound("initial_max_grad_norm", initial_max_grad_norm)
        adaptation = QuantileBounds(quantile, clip_learning_rate, update, count_noise_std)
        self.pieces = replace(self.pieces, adaptation=adaptation, allocation=allocation)

    def groups(self, engine: PerRecordEngine) -> tuple[VectorGroup, ...]:
        """Groups by `clipping`, which start at C_0."""
        return groups_by(self.clipping, engine, self.initial_max_grad_norm)
