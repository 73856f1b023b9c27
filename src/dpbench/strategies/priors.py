"""Priors of the error correction, estimated by training on public data."""

from __future__ import annotations

import torch

from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.denoising import ErrorCorrection, Priors, estimate_priors
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.strategies.references import ClipOnly


class PublicPriors(ClipOnly):
    """Trains without noise on *public* data and counts how often sums fall under each hypothesis.

    (gradient_compression_denoising_2020, 3.2: "If we have access to some public data, then we can estimate the values
    of marginal probabilities of each hypotheses using maximum likelihood estimation".)

    Guarantee: none. Never give it private data.

    The options are those of `DiscretizedDPSGD`; nothing is corrected, and `priors` are left out of account.
    """

    correction_threshold: float | None = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lots: list[Priors] = []
        self._releases.watchers.append(self._count)

    def design(self) -> Recipe:
        """Recipe of `ClipOnly` with sums that are counted, not corrected."""
        if self.correction_threshold is None:
            raise ConfigurationError("priors needs error correction: also set correction_threshold.")
        self._threshold, self._scale = self.correction_threshold, self.correction_scale
        ErrorCorrection(self._threshold, self.correction_hypotheses, self._scale)  # refuses what it cannot take
        self.correction_threshold = self.priors = None
        return super().design()

    def _count(self, mechanism: Mechanism) -> None:
        sums = torch.cat([part.flatten() for part in mechanism.gradients])
        divisor = mechanism.plan.denominator if self._scale == "mean" else 1.0
        self._lots.append(estimate_priors(sums / divisor, self._threshold))

    @property
    def estimate(self) -> list[float]:
        """[p_down, p_stop, p_up], the mean over the batches of the training; they sum to 1."""
        down, _, up = torch.tensor(self._lots, dtype=torch.float64).mean(0).tolist()
        return [down, 1 - down - up, up]
