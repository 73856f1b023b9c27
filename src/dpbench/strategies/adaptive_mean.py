"""Adaptive clipping at a multiple of the private mean norm (three_tools_2018, 2.2)."""

from __future__ import annotations

from dpbench.callback.strategy import PrivateStrategy
from dpbench.options import Positive
from dpbench.privacy.mechanism.adaptive import MeanNormBounds
from dpbench.privacy.mechanism.plan import NoiseAllocation
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.strategies.dpsgd import Clipping, groups_by


class AdaptiveMeanClipping(PrivateStrategy):
    r"""DP-SGD with bounds of α times the private mean norm of the previous batch, for each layer.

    .. math::
        C_t = \frac{\alpha}{m} \Big( \sum_i \min(\|g_i\|_2, \beta C_{t-1})
              + \mathcal N(0, (\sigma_{l2} \beta C_{t-1})^2) \Big)

    (`privacy.mechanism.adaptive.MeanNormBounds`). The first bounds are α times the mean norms of one step on random
    noise, which touches no private data.

    Guarantee: that of `DPSGD` with the same `noise_multiplier` z. The norm queries cost a part of it: the gradients get
    :math:`z_\Delta = (z^{-2} - G \sigma_{l2}^{-2})^{-1/2}` for G layers.

    Args:
        alpha: α.
        beta: β > 1.
        norm_noise_multiplier: σ_l2; None takes the paper's share of the budget: 2.5/0.725 times z√G. (The paper's σ is
            the noise of one layer, z√G here.)
        initial_max_grad_norm: First bound of all layers together instead of the step on random noise. Needed where
            neither data module nor module has `noise_batch(size, generator)`, and in manual optimization.
        clipping: Grouping of the clipping, as for `DPSGD`.
        allocation: How noise is shared among groups; "proportional" is the paper's.
    """

    alpha: float = 1.1
    beta: float = 2.0
    norm_noise_multiplier: float | None = None
    initial_max_grad_norm: Positive | None = None
    clipping: Clipping = "per_layer"
    allocation: NoiseAllocation = "proportional"

    def design(self) -> Recipe:
        """Groups by `clipping`, which start at the given bound or at those that random noise gives."""
        first = self.initial_max_grad_norm
        return Recipe(
            groups_by(self.clipping, 1.0 if first is None else first),
            allocation=self.allocation,
            adaptation=MeanNormBounds(self.alpha, self.beta, self.norm_noise_multiplier),
            bounds_from_noise=self.alpha if first is None else None,
        )
