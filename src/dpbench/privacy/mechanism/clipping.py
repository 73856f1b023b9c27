"""Clipping: the bound on the influence of one record on the released sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpbench.canonical import name_of
from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.parameter import ParameterGradients

SMALLEST = 1e-10
"""Smallest bound and scale: far from where float32 loses squares or noise, as is `LARGEST`."""
LARGEST = 1e10
_ZERO_NORM = 1e-12
_LEAST_STABILITY = 1e-3
_ROUNDING = 2**-20
"""Share by which a factor may exceed C/‖g_r‖: several roundings of float32."""
_TOLERANCE = 1e-5
"""Share of C by which the factors of a rule may be off when it is tried; in a batch they are capped."""

ClipFactors = Callable[[Tensor, float], Tensor]
"""(squared norms (R,), C) → factors (R,) from 0 to C/‖g_r‖, each a function of its own record's squared norm.

The norms are those of a record's whole group. Factors that follow from a part of it, such as the last layer, would
leave the rest without a bound: then that part is a group of its own. A rule of a private recipe other than
`clip_factors` is tried before training and capped in each batch: `CappedFactors`.
"""

Bounds = tuple[float, ...]
"""One bound for each group."""


@dataclass(frozen=True)
class VectorGroup:
    """Parameters with gradients that are clipped together (general_approach_2018, section 2).

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
            square that overflows) gets weight zero: it contributes nothing, and leaves no trace.
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
            f"stability must be at least {_LEAST_STABILITY:g}, not {stability} (the paper uses 0.01): below that, the "
            "rounding error of a record without a gradient would be scaled up to the bound, and it depends on the "
            "other records of the batch, so no sensitivity holds."
        )
    return partial(normalize_weights, stability=stability)


def unclipped_factors(squared_norms: Tensor, max_grad_norm: float) -> Tensor:
    """Factors 1: no clipping, hence no privacy. For references only; non-finite records still count as zero."""
    return squared_norms.isfinite().to(squared_norms.dtype)


class CappedFactors:
    """Factors of another rule than `clip_factors`, made to clip.

    Guarantee: in each batch factor × norm ≤ C, whatever the rule returns, and a record's factor follows from its own
    squared norm: the rule is never given that of another record. Factors are at most max(1, C/0.001) as well, for the
    reason that `normalizing` states. That the rule keeps no state is tried only.

    Args:
        rule: The rule, given squared norms and C.
    """

    def __init__(self, rule: ClipFactors) -> None:
        # An attribute `func` of another class need not be the function that it calls.
        function = rule.func if type(rule) is partial else rule
        self._rule = rule
        self._name = name_of(function)
        # Ours looks at each record alone, as can be read above.
        self._is_ours = function is normalize_weights

    def __call__(self, squared_norms: Tensor, max_grad_norm: float) -> Tensor:
        """Capped factors, shape (R,); zero for norms that are not finite."""
        if not len(squared_norms):
            return squared_norms.clone()
        factors = self._of_each_alone(squared_norms, max_grad_norm)
        least_norm = min(max_grad_norm, _LEAST_STABILITY)
        limits = squared_norms.clamp(min=least_norm**2).rsqrt_()
        limits.mul_(max_grad_norm * (1 + _ROUNDING))
        capped = torch.minimum(factors.clamp(min=0.0), limits)
        return capped.nan_to_num_(nan=0.0)

    def _of_each_alone(self, squared_norms: Tensor, max_grad_norm: float) -> Tensor:
        if self._is_ours:
            return self._rule(squared_norms, max_grad_norm)
        # A copy, since a rule may write into its argument.
        rows = squared_norms.clone()[:, None]
        factors = record_by_record(lambda row: self._rule(row, max_grad_norm), rows)
        return factors.view(-1).to(squared_norms)

    @torch.no_grad()
    def check(self, bounds: Iterable[float], device: torch.device) -> None:
        """Try the rule on made-up norms, from below float32's smallest number to above its largest.

        Args:
            bounds: C of each group.
            device: The device on which records will be clipped.

        Raises:
            ConfigurationError: A factor is negative, not finite or above C/‖g‖, depends on other records, or changes
                from call to call.
        """
        for bound in sorted(set(bounds)):
            self._check_bound(_made_up_squared_norms(bound).to(device), bound)

    def _check_bound(self, squared_norms: Tensor, bound: float) -> None:
        factors = self._rule(squared_norms.clone(), bound)
        if not isinstance(factors, Tensor) or factors.shape != squared_norms.shape:
            shape = tuple(factors.shape) if isinstance(factors, Tensor) else type(factors).__name__
            raise ConfigurationError(
                f"clip_factors={self._name} must return one factor for each of {len(squared_norms)} squared norms, in "
                f"a tensor of their shape, not {shape}."
            )
        factors = factors.to(squared_norms)
        norms = squared_norms.double().sqrt()
        # A negative factor would keep the bound, too, but walks uphill: a sign that was mistaken.
        clips = (factors >= 0) & (factors * norms <= bound * (1 + _TOLERANCE))
        if not clips.all():
            position = int(clips.int().argmin())
            factor = float(factors[position])
            too_large = factor > 0 and norms[position] > 0
            hint = " Its argument is squared norms: take squared_norms.sqrt() first." if too_large else ""
            raise ConfigurationError(
                f"clip_factors={self._name} returns {factor:.4g} for a squared norm of "
                f"{float(squared_norms[position]):.4g}: a factor must be finite, from 0 to max_grad_norm / norm = "
                f"{float(bound / norms[position]):.4g}.{hint}"
            )
        again = self._rule(squared_norms.clone(), bound).to(squared_norms)
        alone = self._of_each_alone(squared_norms, bound)
        problems = {
            "different factors for the same squared norms when called again: make it a function without random "
            "numbers or state.": again,
            "different factors for a record alone and among others: compute each factor from the record's own squared "
            "norm, without means, quantiles or counts over the batch.": alone,
        }
        for problem, others in problems.items():
            differences = (others - factors).abs() * norms
            if not (differences <= _TOLERANCE * bound).all():
                raise ConfigurationError(f"clip_factors={self._name} returns {problem}")


def _made_up_squared_norms(bound: float) -> Tensor:
    """Squared norms of all sizes that float32 has, densest around the bound."""
    exponents = torch.linspace(-44.8, 38.5, 700, dtype=torch.float64)
    ratios = torch.linspace(-1, 1, 65, dtype=torch.float64)
    near = bound**2 * 10**ratios
    at_bound = torch.tensor([0.0, bound**2])
    above = at_bound.nextafter(torch.tensor(math.inf))
    return torch.cat([at_bound, above, near.float(), (10**exponents).float()])


def record_by_record(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function of one record to each of several, one after the other.

    Args:
        function: A record's row → the record's result.
        rows: Shape (R, *row), R ≥ 1.

    Returns:
        Shape (R, *result).
    """
    return torch.stack([function(row) for row in rows])


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
    factors_of: ClipFactors = clip_factors,
    into: Sequence[Tensor] | None = None,
    all_finite: Tensor | None = None,
    present: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Clip every record in every group and add the records up.

    Guarantee, with factors as `ClipFactors` states them (those of `Recipe.factors` are): adding or removing one record
    moves the part of the result that belongs to group g, divided by the group's scales, by at most
    `groups[g].max_grad_norm` in l2 norm, whatever the record (float32 rounding aside, in every precision of the network
    and of matrix products). A record with a non-finite gradient anywhere contributes zero everywhere.

    Args:
        gradients: Per-record gradients of each trainable parameter, for one batch of R records.
        groups: A partition of the parameters.
        factors_of: The rule by which a squared norm becomes a factor.
        into: Running sums in the parameters' shapes, to which the result is added; None: new ones.
        all_finite: A flag on the device that is cleared where a record is not finite, instead of leaving that record
            out: then nothing waits for the device, and the sums hold only if the flag is still set.
        present: Mask of the rows that are records, bool, shape (R,); the others are padding, with weight zero. It goes
            with `all_finite`, which is cleared if padding has a gradient, too: the loss should not depend on it. None:
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
            return clip_and_sum(selected, groups, factors_of, into)
    # New sums have placeholders first: each parameter is in one group, whose turn comes below.
    sums = list(into) if into is not None else [norms.new_empty(0)] * len(gradients)
    squared_norms = group_squared_norms(norms, groups)
    for group, squared_norms_of_group in zip(groups, squared_norms, strict=True):
        weights = factors_of(squared_norms_of_group, group.max_grad_norm)
        if present is not None:
            weights = torch.where(present, weights, 0.0)
        for position in group.parameters:
            parameter = gradients[position]
            if into is None:
                sums[position] = parameter.weighted_sum(weights)
            else:
                parameter.add_weighted_sum(weights, into[position])
    return sums, squared_norms
