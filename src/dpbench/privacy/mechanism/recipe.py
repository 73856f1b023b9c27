"""What a strategy does with the records of a lot, as data: no model, no data set, no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from functools import partial

import torch
from torch import Tensor

from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism import clipping
from dpbench.privacy.mechanism.adaptive import Adaptation
from dpbench.privacy.mechanism.clipping import ClipFactors, Groups, unclipped_factors
from dpbench.privacy.mechanism.denoising import ErrorCorrection
from dpbench.privacy.mechanism.groups import flat_groups
from dpbench.privacy.mechanism.metrics import PrivateMetrics
from dpbench.privacy.mechanism.plan import NoiseAllocation
from dpbench.renamed import warn_of_old_name

Grouping = Callable[[Sequence[str], Sequence[int]], Groups]
"""(names, numbers of coordinates) of the trainable parameters → a partition of them with the first bounds."""

Transform = Callable[[Sequence[ParameterGradients], int, Sequence[int]], Sequence[ParameterGradients]]
"""(gradients of R records by each parameter, R, numbers of coordinates) → the same of what becomes of each record."""

ONE_GROUP: Grouping = partial(flat_groups, max_grad_norm=1.0)
"""All parameters together, at a bound of 1."""


@dataclass(frozen=True)
class Recipe:
    """Parts that a strategy is made of; each can be exchanged alone.

    Attributes:
        groups: Which parameters are clipped together, and the first bounds.
        clip_factors: How a record's norm becomes the factor that clips it.
        allocation: How noise is shared among groups.
        adaptation: How bounds follow the gradients, or None for fixed ones.
        bounds_from_noise: α: the first bounds are α times the mean norms of a step on random noise, which touches no
            private data; None: those of `groups`.
        transform: What each record's gradient becomes before it is clipped, or None: it stays.
        denoiser: Post-processing of the noisy sum, or None.
        metrics: Released beside the gradients, or None.
        noise: Whether noise is added. Without it nothing is private: an error-free reference.
        private: Whether the releases carry a guarantee, and so have a ledger and an epsilon.
    """

    groups: Grouping = ONE_GROUP
    clip_factors: ClipFactors = clipping.clip_factors
    allocation: NoiseAllocation = "equal"
    adaptation: Adaptation | None = None
    bounds_from_noise: float | None = None
    transform: Transform | None = None
    denoiser: ErrorCorrection | None = None
    metrics: PrivateMetrics | None = None
    noise: bool = True
    private: bool = True
    weights_of: InitVar[ClipFactors | None] = None

    def __post_init__(self, weights_of: ClipFactors | None) -> None:
        if weights_of is not None:
            warn_of_old_name("Recipe(weights_of=...)", "clip_factors")
            object.__setattr__(self, "clip_factors", weights_of)
        if self.private and not self.noise:
            raise ValueError("a release without noise is not private")
        if self.private and self.clip_factors is unclipped_factors:
            raise ValueError("a release without clipping is not private")

    def metrics_of(self, output: object, rows: int) -> Tensor:
        """What each row of a training step's output offers to the metrics, over their bounds, shape (R, values)."""
        values = None
        if isinstance(output, dict):
            values = output.get("record_metrics")
        if self.metrics is None:
            return torch.zeros(rows, 0)
        return self.metrics.of_rows(values or {}, rows)

    def contributions(self, norms: Tensor, bound: float) -> Tensor:
        """Norms that records of some norms have once they are clipped at a bound."""
        return self.clip_factors(norms.square(), bound) * norms

    def negligible_norm(self, bound: float) -> float:
        """Norm of a record's gradient that changes may be measured against: what is smaller hardly moves the sum.

        A hundredth of the bound where records are clipped at it, less where small gradients are made large.

        Args:
            bound: C, smallest of the groups'.
        """
        norms = bound * torch.logspace(-2, -12, 11, dtype=torch.float64)
        is_small = self.contributions(norms, bound) <= 0.51 * bound
        negligible = float(norms[-1])
        if is_small.any():
            small = norms[is_small]
            negligible = float(small.max())
        norm_of_transform = getattr(self.transform, "negligible_norm", negligible)
        return min(negligible, norm_of_transform)
