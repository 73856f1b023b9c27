"""Automatic clipping (Bu, Wang, Zha, Karypis 2022): every record's gradient is brought to the same norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpbench.privacy.clipping import normalising
from dpbench.strategies.dpsgd import DPSGD


class AutomaticClipping(DPSGD):
    r"""DP-SGD with normalised instead of clipped gradients, so that there is no bound to tune.

    .. math:: \tilde g = \frac{1}{qN} \Big( \sum_{i \in L} C \frac{g_i}{\|g_i\|_2 + \gamma}
              + \mathcal N(0, z^2 C^2 I) \Big)

    (AUTO-S; with γ = 0 AUTO-V.) C only scales the update, as the learning rate does.

    Guarantee: that of `DPSGD`; a normalised gradient has at most norm C.

    Args:
        stability: γ ≥ 0.
        **options: See `DPSGD`.
    """

    def __init__(self, stability: float = 0.01, **options: Any) -> None:
        super().__init__(**options)
        self.pieces = replace(self.pieces, weights_of=normalising(stability))
