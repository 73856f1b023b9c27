"""Adaptive clipping at a multiple of the private mean norm (three_tools_2018, 2.2)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch

from dpbench.errors import ConfigurationError
from dpbench.privacy.adaptive import MeanNormBounds, with_bounds
from dpbench.privacy.clipping import VectorGroup, group_norms
from dpbench.privacy.engine import PerRecordEngine
from dpbench.privacy.gradients import ParameterGradients
from dpbench.privacy.mechanism import before_clipping
from dpbench.privacy.noise import keyed_generator
from dpbench.privacy.plan import NoiseAllocation
from dpbench.strategies.base import PrivateStrategy
from dpbench.strategies.dpsgd import Clipping, check_bound, check_clipping, groups_by
from dpbench.strategies.probe import record_gradients

_NOISE_DATA_STREAM = 5
_RECORDS = 64


class AdaptiveMeanClipping(PrivateStrategy):
    r"""DP-SGD whose bounds are α times the private mean norm of the previous lot, for each layer.

    .. math::
        C_t = \frac{\alpha}{m} \Big( \sum_i \min(\|g_i\|_2, \beta C_{t-1})
              + \mathcal N(0, (\sigma_{l2} \beta C_{t-1})^2) \Big)

    (`privacy.adaptive.MeanNormBounds`). The first bounds are α times the mean norms of one step on random noise, which
    touches no private data.

    Guarantee: that of `DPSGD` with the same `noise_multiplier` z. The norm queries cost a part of it: the gradients get
    :math:`z_\Delta = (z^{-2} - G \sigma_{l2}^{-2})^{-1/2}` for G layers.

    Args:
        alpha: α.
        beta: β > 1.
        norm_noise_multiplier: σ_l2; None takes the paper's share of the budget: 2.5/0.725 times z√G. (The paper's σ is
            the noise of one layer, z√G here.)
        initial_max_grad_norm: First bound of all layers together instead of the step on random noise. Needed where
            neither data module nor module has `noise_batch(size, generator)`, and in manual optimization.
        clipping: As for `DPSGD`.
        allocation: How noise is shared among groups; "proportional" is the paper's.
        **options: See `PrivateStrategy`.
    """

    def __init__(
        self,
        alpha: float = 1.1,
        beta: float = 2.0,
        norm_noise_multiplier: float | None = None,
        initial_max_grad_norm: float | None = None,
        clipping: Clipping = "per_layer",
        allocation: NoiseAllocation = "proportional",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_clipping(clipping)
        if initial_max_grad_norm is not None:
            check_bound("initial_max_grad_norm", initial_max_grad_norm)
        self.clipping, self.initial_max_grad_norm = clipping, initial_max_grad_norm
        self.pieces = replace(
            self.pieces, adaptation=MeanNormBounds(alpha, beta, norm_noise_multiplier), allocation=allocation
        )
        self._alpha = alpha

    def groups(self, engine: PerRecordEngine) -> tuple[VectorGroup, ...]:
        """Groups by `clipping`."""
        return groups_by(self.clipping, engine, self.initial_max_grad_norm or 1.0)

    def initial_groups(self, trainer: pl.Trainer, engine: PerRecordEngine) -> tuple[VectorGroup, ...]:
        """Bounds from one step on random noise, the same on all processes."""
        groups = self.groups(engine)
        if self.initial_max_grad_norm is not None or self._memory.get("bounds") is not None:
            return groups
        module = trainer.lightning_module
        maker: Any = next((x for x in (trainer.datamodule, module) if hasattr(x, "noise_batch")), None)  # type: ignore[attr-defined]
        if maker is None or not module.automatic_optimization:
            raise ConfigurationError(
                "adaptive mean clipping starts from a step on random noise: give the data module (or the module) a "
                "method noise_batch(size, generator), or set initial_max_grad_norm (the only way in manual "
                "optimization, and so for a GAN)."
            )
        key = secrets.randbits(128) if self.seed is None else self.seed
        batch = maker.noise_batch(_RECORDS * self.pieces.microbatch_size, keyed_generator((key, _NOISE_DATA_STREAM)))
        gradients, records = record_gradients(trainer, engine, batch, seed=0)
        means = self._mean_norms(engine, gradients, records, groups)
        return with_bounds(groups, trainer.strategy.broadcast([self._alpha * mean for mean in means]))

    def _mean_norms(
        self,
        engine: PerRecordEngine,
        gradients: Sequence[ParameterGradients],
        records: int,
        groups: tuple[VectorGroup, ...],
    ) -> list[float]:
        size, merge = self.pieces.microbatch_size, None
        if size > 1:
            rows = torch.arange(records, device=engine.parameters[0].device)
            merge = (rows // size, records // size, 1 / size)
        sizes = [parameter.numel() for parameter in engine.parameters]
        _, prepared = before_clipping(gradients, records, merge, self.pieces.discretization_threshold, sizes)
        norms = torch.stack([parameter.squared_norms() for parameter in prepared])
        means: list[float] = group_norms(norms, groups).sqrt().mean(1).tolist()
        return means
