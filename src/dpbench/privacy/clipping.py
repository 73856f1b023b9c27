"""Clipping: what bounds the influence of one record on the released sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients import ParameterGradients


@dataclass(frozen=True)
class VectorGroup:
    """Parameters whose gradients are clipped together (general_approach_2018, section 2).

    Attributes:
        name: Shown in the ledger.
        parameters: Positions in the list of trainable parameters.
        max_grad_norm: Upper bound of a record's l2 norm over the group.
    """

    name: str
    parameters: tuple[int, ...]
    max_grad_norm: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ConfigurationError(f"max_grad_norm must be a positive number, not {self.max_grad_norm}.")


def flat_groups(names: Sequence[str], max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """One group of all parameters (Abadi et al. 2016, algorithm 1)."""
    return (VectorGroup("all", tuple(range(len(names))), max_grad_norm),)


def per_layer_groups(names: Sequence[str], max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """One group for each of the m modules that own parameters, each clipped at `max_grad_norm` / √m.

    The l2 sensitivity of the whole vector is `max_grad_norm`, as with flat clipping (general_approach_2018, 2.1).
    """
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        layers.setdefault(name.rpartition(".")[0] or name, []).append(position)
    bound = max_grad_norm / math.sqrt(len(layers)) if layers else max_grad_norm
    return tuple(VectorGroup(layer, tuple(positions), bound) for layer, positions in layers.items())


CLIPPINGS = {"flat": flat_groups, "per_layer": per_layer_groups}


def clip_weights(squared_norms: Tensor, max_grad_norm: float) -> Tensor:
    """Factors min(1, C / ‖g_r‖) that bring each record's norm down to at most C.

    Args:
        squared_norms: ‖g_r‖², shape (R,). A record with a non-finite norm (NaN or infinite gradients, or a
            square that overflows) gets weight zero: it contributes nothing, and nobody can tell that it was there.
        max_grad_norm: C.

    Returns:
        Weights in [0, 1], shape (R,).
    """
    weights = (max_grad_norm / squared_norms.sqrt()).clamp(max=1.0)
    return torch.where(squared_norms.isfinite(), weights, torch.zeros_like(weights))


def clip_and_sum(gradients: Sequence[ParameterGradients], groups: Sequence[VectorGroup]) -> list[Tensor]:
    """Clip every record in every group and add the records up.

    Guarantee: adding or removing one record moves the part of the result that belongs to group g by at most
    `groups[g].max_grad_norm` in l2 norm, whatever the record (float rounding aside). A record with a non-finite
    gradient anywhere contributes zero everywhere.

    Args:
        gradients: Per-record gradients of each trainable parameter, for one lot of R records.
        groups: A partition of the parameters.

    Returns:
        One tensor for each parameter, in its shape.
    """
    norms = torch.stack([parameter.squared_norms() for parameter in gradients])
    finite = norms.isfinite().all(0)
    if not finite.all():
        keep = finite.nonzero().squeeze(1)
        return clip_and_sum([parameter.select(keep) for parameter in gradients], groups)
    sums: list[Tensor] = [norms.new_empty(0)] * len(gradients)
    for group in groups:
        members = list(group.parameters)
        weights = clip_weights(norms[members].sum(0), group.max_grad_norm)
        for position in members:
            sums[position] = gradients[position].weighted_sum(weights)
    return sums
