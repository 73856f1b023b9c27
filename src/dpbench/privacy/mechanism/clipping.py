"""Clipping: what bounds the influence of one record on the released sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.renamed import old_names

SMALLEST = 1e-10
"""Smallest bound and scale: far from where float32 loses squares or noise, as is `LARGEST`."""
LARGEST = 1e10
_ZERO_NORM = 1e-12
_LEAST_STABILITY = 1e-3

ClipFactors = Callable[[Tensor, float], Tensor]
"""(squared norms (R,), C) → weights (R,) that bring each norm down to at most C.

The norms are those of a record's whole group. Weights that follow from a part of it, such as the last layer, would
leave the rest without a bound: then that part is a group of its own.
"""

Bounds = tuple[float, ...]
"""One bound for each group."""


@dataclass(frozen=True)
class VectorGroup:
    """Parameters whose gradients are clipped together (general_approach_2018, section 2).

    Attributes:
        name: Shown in the ledger.
        parameters: Positions in the list of trainable parameters.
        max_grad_norm: S_g, upper bound of a record's l2 norm over the group.
        scales: α_j > 0 for each of `parameters`: norms are taken, and noise is added, after the division of parameter
            j's gradient by α_j ("joint clipping"). Empty: all 1.
    """

    name: str
    parameters: tuple[int, ...]
    max_grad_norm: float
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not SMALLEST <= self.max_grad_norm <= LARGEST:
            raise ConfigurationError(
                f"max_grad_norm must be a positive number from {SMALLEST:g} to {LARGEST:g}, not {self.max_grad_norm}."
            )
        if self.scales and len(self.scales) != len(self.parameters):
            raise ConfigurationError(f"group {self.name} needs one scale for each parameter.")
        if not all(SMALLEST <= scale <= LARGEST for scale in self.scales):
            raise ConfigurationError(
                f"the scales of group {self.name} must be positive numbers from {SMALLEST:g} to {LARGEST:g}, not "
                f"{self.scales}."
            )


Groups = tuple[VectorGroup, ...]
"""A partition of the parameters, in the order of the ledger."""


def clip_factors(squared_norms: Tensor, max_grad_norm: float) -> Tensor:
    """Factors min(1, C / ‖g_r‖) that bring each record's norm down to at most C (Abadi et al. 2016).

    Args:
        squared_norms: ‖g_r‖², shape (R,). A record with a non-finite norm (NaN or infinite gradients, or a
            square that overflows) gets weight zero: it contributes nothing, and nobody can tell that it was there.
        max_grad_norm: C.

    Returns:
        Weights in [0, 1], shape (R,).
    """
    weights = squared_norms.rsqrt().mul_(max_grad_norm).clamp_(max=1.0)
    # The weight of an infinite norm is 0 already.
    return weights.nan_to_num_(nan=0.0)


def normalize_weights(
    squared_norms: Tensor,
    max_grad_norm: float,
    stability: float,
) -> Tensor:
    """Factors C / (‖g_r‖ + γ) that bring each record's norm to just below C (Bu et al. 2022, AUTO-S).

    Args:
        squared_norms: ‖g_r‖², shape (R,); non-finite ones get weight zero.
        max_grad_norm: C.
        stability: γ ≥ 0; with 0 every norm becomes C (AUTO-V), but for norms below 1e-12, which count as zero: float32
            cannot tell them apart.

    Returns:
        Weights, shape (R,).
    """
    norms = squared_norms.sqrt()
    weights = max_grad_norm / (norms + stability)
    is_usable = squared_norms.isfinite() & (norms > _ZERO_NORM)
    return torch.where(is_usable, weights, torch.zeros_like(weights))


def normalizing(stability: float) -> ClipFactors:
    """`normalize_weights` with a fixed γ.

    Raises:
        ConfigurationError: γ is so small that rounding errors would count.
    """
    if not _LEAST_STABILITY <= stability < math.inf:
        raise ConfigurationError(
            f"stability must be a number from {_LEAST_STABILITY:g} on, not {stability}: below (AUTO-V has 0), the "
            "rounding error of a record that is learned already would count as a whole gradient, and it depends on the "
            "other records of a batch, so that no sensitivity holds. 0.01 is the paper's."
        )
    return partial(normalize_weights, stability=stability)


def unclipped_factors(squared_norms: Tensor, max_grad_norm: float) -> Tensor:
    """Factors 1: no clipping, hence no privacy. For references only; non-finite records still count as zero."""
    return squared_norms.isfinite().to(squared_norms.dtype)


def group_squared_norms(norms: Tensor, groups: Sequence[VectorGroup]) -> Tensor:
    """Squared norm of each record in each group, after division by the group's scales.

    Args:
        norms: Squared norm of each parameter's gradient, shape (parameters, R).
        groups: A partition of the parameters.

    Returns:
        Shape (groups, R).
    """
    rows = []
    for group in groups:
        members = _rows_of(norms, group.parameters)
        if group.scales:
            squared_scales = norms.new_tensor(group.scales).square()
            members = members / squared_scales[:, None]
        rows.append(members.sum(0))
    if len(rows) == 1:
        return rows[0][None]
    return torch.stack(rows)


def _rows_of(norms: Tensor, parameters: tuple[int, ...]) -> Tensor:
    """Rows of some parameters: a view where they follow one another, since a list of positions has a GPU waited for."""
    if parameters:
        start = parameters[0]
        end = parameters[-1] + 1
        if parameters == tuple(range(start, end)):
            return norms[start:end]
    return norms[list(parameters)]


@tf32.refused_in_matrix_products()
def clip_and_sum(
    gradients: Sequence[ParameterGradients],
    groups: Sequence[VectorGroup],
    weights_of: ClipFactors = clip_factors,
    into: Sequence[Tensor] | None = None,
    all_finite: Tensor | None = None,
    present: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Clip every record in every group and add the records up.

    Guarantee: adding or removing one record moves the part of the result that belongs to group g, divided by the
    group's scales, by at most `groups[g].max_grad_norm` in l2 norm, whatever the record (float32 rounding aside, in
    every precision of the network and of matrix products). A record with a non-finite gradient anywhere contributes
    zero everywhere.

    Args:
        gradients: Per-record gradients of each trainable parameter, for one lot of R records.
        groups: A partition of the parameters.
        weights_of: How a record's norm becomes its factor.
        into: Running sums in the parameters' shapes, to which the result is added; None: new ones.
        all_finite: A flag on the device that is cleared where a record is not finite, instead of leaving that record
            out: then nobody waits for the device, and the sums hold only if the flag is still set.
        present: Which rows are records, bool, shape (R,); the others are padding, with weight zero. Goes with
            `all_finite`, which is cleared where padding has a gradient, too: the loss should not depend on it. None:
            all rows.

    Returns:
        The sums, one tensor for each parameter, in its shape; and the squared norms before clipping, shape
        (groups, R'), of the R' records that are finite (private: only for statistics that are noised themselves).
    """
    norms = torch.stack([parameter.squared_norms() for parameter in gradients])
    if all_finite is not None:
        is_finite = norms.sum().isfinite()
        all_finite.logical_and_(is_finite)
        if present is not None:
            of_padding = torch.where(present, 0.0, norms).sum()
            all_finite.logical_and_(of_padding < _ZERO_NORM)
    # One number is read from the device where all is finite. The sum of finite norms may overflow, too.
    elif not math.isfinite(norms.sum()):
        finite = norms.isfinite().all(0)
        if not finite.all():
            positions = finite.nonzero().squeeze(1)
            selected = [parameter.select(positions) for parameter in gradients]
            return clip_and_sum(selected, groups, weights_of, into)
    # New sums have placeholders first: each parameter is in one group, whose turn comes below.
    sums = list(into) if into is not None else [norms.new_empty(0)] * len(gradients)
    squared_norms = group_squared_norms(norms, groups)
    for group, squared_norms_of_group in zip(groups, squared_norms, strict=True):
        weights = weights_of(squared_norms_of_group, group.max_grad_norm)
        if present is not None:
            weights = torch.where(present, weights, 0.0)
        for position in group.parameters:
            parameter = gradients[position]
            if into is None:
                sums[position] = parameter.weighted_sum(weights)
            else:
                parameter.add_weighted_sum(weights, into[position])
    return sums, squared_norms


__getattr__ = old_names(
    __name__,
    {
        "WeightFunction": "ClipFactors",
        "clip_weights": "clip_factors",
        "group_norms": "group_squared_norms",
        "unclipped_weights": "unclipped_factors",
    },
)
