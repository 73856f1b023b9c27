"""Automatic clipping (Bu, Wang, Zha, Karypis 2022): every record's gradient is brought to the same norm."""

from __future__ import annotations

from dataclasses import replace

from dpbench.privacy.mechanism.clipping import normalizing
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.strategies.dpsgd import DPSGD


class AutomaticClipping(DPSGD):
    r"""DP-SGD with normalized instead of clipped gradients, so that there is no bound to tune.

    .. math:: \tilde g = \frac{1}{qN} \Big( \sum_{i \in L} C \frac{g_i}{\|g_i\|_2 + \gamma}
              + \mathcal N(0, z^2 C^2 I) \Big)

    (AUTO-S. AUTO-V, with γ = 0, is refused: of a record that is learned it makes a vector of norm C out of rounding
    errors, which depend on the others of its batch.) C only scales the update, as the learning rate does.

    Guarantee: that of `DPSGD`; a normalized gradient has at most norm C.

    Args:
        stability: γ, from 0.001 on.
    """

    stability: float = 0.01

    def design(self) -> Recipe:
        """Recipe of `DPSGD` with factors that normalize instead of clip."""
        return replace(super().design(), clip_factors=normalizing(self.stability))
