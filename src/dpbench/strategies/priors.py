"""Priors of the error correction, estimated by training on public data."""

from __future__ import annotations

from typing import Any

import torch

from dpbench.errors import ConfigurationError
from dpbench.privacy.denoising import ErrorCorrection, Hypotheses, Priors, Scale, estimate_priors
from dpbench.privacy.mechanism import Mechanism
from dpbench.strategies.references import ClipOnly


class PublicPriors(ClipOnly):
    """Trains without noise on *public* data and counts how often sums fall under each hypothesis.

    (gradient_compression_denoising_2020, 3.2: "If we have access to some public data, then we can estimate the values
    of marginal probabilities of each hypotheses using maximum likelihood estimation".)

    Guarantee: none. Never give it private data.

    Args:
        correction_threshold: ν.
        correction_hypotheses: Without meaning here; lets the options of `DiscretizedDPSGD` pass.
        correction_scale: What ν is compared with.
        **options: See `DPSGD`.
    """

    def __init__(
        self,
        correction_threshold: float | None = 0.01,
        correction_hypotheses: Hypotheses = "points",
        correction_scale: Scale = "sum",
        **options: Any,
    ) -> None:
        if correction_threshold is None:
            raise ConfigurationError("priors are those of an error correction: give a correction_threshold.")
        ErrorCorrection(correction_threshold, correction_hypotheses, correction_scale)  # refuses what it cannot take
        super().__init__(**{**options, "priors": None})
        self._threshold, self._scale = correction_threshold, correction_scale
        self._lots: list[Priors] = []

    def _add_noise(self, mechanism: Mechanism, generator: torch.Generator) -> None:
        sums = torch.cat([part.flatten() for part in mechanism.gradients])
        divisor = mechanism.plan.expected_records if self._scale == "mean" else 1.0
        self._lots.append(estimate_priors(sums / divisor, self._threshold))

    @property
    def estimate(self) -> list[float]:
        """[p_down, p_stop, p_up], the mean over the lots of the training; they sum to 1."""
        down, _, up = torch.tensor(self._lots, dtype=torch.float64).mean(0).tolist()
        return [down, 1 - down - up, up]
