"""A strategy's treatment of the records of a batch, as data: no model, no data set, no Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism import clipping
from dpbench.privacy.mechanism.adaptive import Adaptation, BoundedSums
from dpbench.privacy.mechanism.clipping import CappedFactors, ClipFactors, Groups, unclipped_factors
from dpbench.privacy.mechanism.denoising import ErrorCorrection
from dpbench.privacy.mechanism.groups import flat_groups
from dpbench.privacy.mechanism.metrics import PrivateMetrics
from dpbench.privacy.mechanism.plan import NoiseAllocation

Grouping = Callable[[Sequence[str], Sequence[int]], Groups]
"""(names, numbers of coordinates) of the trainable parameters → a partition of them with the first bounds."""

Transform = Callable[[Sequence[ParameterGradients], int, Sequence[int]], Sequence[ParameterGradients]]
"""(gradients of R records by each parameter, R, numbers of coordinates) → transformed gradients of the same form."""

ONE_GROUP: Grouping = partial(flat_groups, max_grad_norm=1.0)
"""All parameters together, at a bound of 1."""


@dataclass(frozen=True)
class Recipe:
    """Parts of a strategy, each of which can be exchanged alone.

    Attributes:
        groups: Groups of parameters that are clipped together, and the first bounds.
        clip_factors: (squared_norms, max_grad_norm) → the factor of each record, from 0 to max_grad_norm / norm, where
            norm is squared_norms.sqrt(): that of the record's gradient in a group, after `transform`.
        allocation: How noise is shared among groups.
        adaptation: How bounds follow the norms that are clipped, or None for fixed ones.
        bounds_from_noise: α: the first bounds are α times the mean norms of a step on random noise, which touches no
            private data; None: those of `groups`.
        transform: Function applied to each record's gradient before it is clipped, or None.
        denoiser: Post-processing of the noisy sum, or None.
        metrics: Metrics released with the gradients, or None.
        noise: True to add noise. Without it nothing is private: an error-free reference.
        private: True if the releases carry a guarantee, and so have a ledger and an epsilon.
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

    def __post_init__(self) -> None:
        if self.private and not self.noise:
            raise ValueError("a release without noise is not private")
        if self.private and self.clip_factors is unclipped_factors:
            raise ValueError("a release without clipping is not private")

    @cached_property
    def factors(self) -> ClipFactors:
        """The factors that clip: those of `clip_factors`, capped where it is another rule and has to be private."""
        if not self.private or self.clip_factors is clipping.clip_factors:
            return self.clip_factors
        return CappedFactors(self.clip_factors)

    @cached_property
    def bounded_sums(self) -> BoundedSums | None:
        """Sums of the statistics of `adaptation`, or None without one."""
        return None if self.adaptation is None else BoundedSums(self.adaptation)

    def contributions(self, norms: Tensor, bound: float) -> Tensor:
        """Norms that records of some norms have once they are clipped at a bound."""
        return self.factors(norms.square(), bound) * norms
