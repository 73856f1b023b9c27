"""Differentially private SGD (Abadi et al. 2016), with any torch optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from dpbench.errors import ConfigurationError
from dpbench.privacy.clipping import VectorGroup
from dpbench.privacy.engine import PerRecordEngine
from dpbench.privacy.groups import CLIPPINGS
from dpbench.privacy.plan import NoiseAllocation
from dpbench.strategies.base import PrivateStrategy

Clipping = Literal["flat", "per_layer", "per_parameter", "by_dimension"]


class DPSGD(PrivateStrategy):
    r"""Clip each record's gradient, sum, add Gaussian noise, divide by the expected lot size.

    .. math:: \tilde g = \frac{1}{qN} \Big( \sum_{i \in L} g_i \min(1, C / \|g_i\|_2) + \mathcal N(0, z^2 C^2 I) \Big)

    (Abadi et al. 2016, algorithm 1.) The released gradient goes to `p.grad`; momentum, Adam and schedules are
    post-processing.

    Guarantee: the unit is an example. With Poisson lots neighbours differ by one added or removed example and the l2
    sensitivity is C; with fixed-size lots they differ by one replaced example and it is 2·C, so that the same
    `noise_multiplier` costs more there.

    Args:
        max_grad_norm: C, the bound on a record's l2 norm over all parameters.
        clipping: "flat" clips the whole gradient at C; "per_layer" each of m layers at C/√m; "per_parameter" weights
            and biases apart; "by_dimension" each layer at C·√(d_g/D), by its number of coordinates.
        allocation: How noise is shared among groups, see `privacy.plan.NoiseAllocation`; without effect on "flat".
        **options: See `PrivateStrategy`: noise_multiplier or target_epsilon, delta, accountant, seed, ...

    Example:
        >>> strategy = DPSGD(max_grad_norm=1.0, noise_multiplier=1.1)
        >>> trainer = pl.Trainer(max_steps=1000, callbacks=[strategy])  # doctest: +SKIP
    """

    def __init__(
        self,
        max_grad_norm: float = 1.0,
        clipping: Clipping = "flat",
        allocation: NoiseAllocation = "equal",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pieces = replace(self.pieces, allocation=allocation)
        check_clipping(clipping)
        self.max_grad_norm, self.clipping = check_bound("max_grad_norm", max_grad_norm), clipping

    def groups(self, engine: PerRecordEngine) -> tuple[VectorGroup, ...]:
        """Groups by `clipping`; the whole clipped gradient has at most norm C."""
        return groups_by(self.clipping, engine, self.max_grad_norm)


def groups_by(clipping: str, engine: PerRecordEngine, bound: float) -> tuple[VectorGroup, ...]:
    """Groups of a model's parameters; the whole clipped gradient has at most norm `bound`."""
    return CLIPPINGS[clipping](engine.names, [parameter.numel() for parameter in engine.parameters], bound)


def check_clipping(clipping: str) -> None:
    """Raise ConfigurationError unless there is a way to group parameters of that name."""
    if clipping not in CLIPPINGS:
        raise ConfigurationError(f"unknown clipping {clipping!r}; known are {', '.join(CLIPPINGS)}.")


def check_bound(name: str, bound: float) -> float:
    """The bound, or a ConfigurationError unless it is a positive number."""
    if not 0 < bound < float("inf"):
        raise ConfigurationError(f"{name} must be a positive number, not {bound}.")
    return bound
