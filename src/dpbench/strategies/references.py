"""Error-free references: clipping without noise, and noise without clipping. Neither is private.

They show what each half of DP-SGD costs: bias by clipping, variance by noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dpbench.errors import ConfigurationError
from dpbench.privacy.clipping import unclipped_weights
from dpbench.privacy.mechanism import Mechanism
from dpbench.strategies.dpsgd import DPSGD


class _Reference(DPSGD):
    private = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.noise_multiplier is None or self.target_epsilon is not None:
            raise ConfigurationError(
                f"{type(self).__name__} is no private training, so it can meet no target_epsilon: give a "
                "noise_multiplier (and target_epsilon=null)."
            )
        if self.pieces.metrics is not None:
            raise ConfigurationError(f"{type(self).__name__} is no private training: it has no private metrics.")


class ClipOnly(_Reference):
    """DP-SGD without the noise: what clipping (or discretization, or error correction) alone does to the accuracy.

    Guarantee: none; there is no ledger, epsilon is infinite.

    Args:
        **options: See `DPSGD`. The noise_multiplier is what the error correction would assume.
    """

    def _add_noise(self, mechanism: Mechanism, generator: torch.Generator) -> None:
        """None."""


class NoiseOnly(_Reference):
    """DP-SGD without the clipping: what noise of standard deviation z·C alone does to the accuracy.

    Guarantee: none, since one record can move the sum without bound; there is no ledger, epsilon is infinite.

    Args:
        **options: See `DPSGD`. The bound max_grad_norm scales the noise only.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pieces = replace(self.pieces, weights_of=unclipped_weights)
