"""Differentially private SGD (Abadi et al. 2016), with any torch optimizer."""

from __future__ import annotations

from typing import Any, Literal

from dpbench.errors import ConfigurationError
from dpbench.privacy.clipping import CLIPPINGS
from dpbench.privacy.engine import PerRecordEngine
from dpbench.privacy.plan import ReleasePlan
from dpbench.privacy.sampling import Sampling
from dpbench.strategies.base import PrivateStrategy


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
        clipping: "flat" clips the whole gradient at C; "per_layer" clips each of m layers at C/√m.
        **options: See `PrivateStrategy`: noise_multiplier or target_epsilon, delta, accountant, seed, ...

    Example:
        >>> strategy = DPSGD(max_grad_norm=1.0, noise_multiplier=1.1)
        >>> trainer = pl.Trainer(max_steps=1000, callbacks=[strategy])  # doctest: +SKIP
    """

    def __init__(
        self, max_grad_norm: float = 1.0, clipping: Literal["flat", "per_layer"] = "flat", **options: Any
    ) -> None:
        super().__init__(**options)
        if not 0 < max_grad_norm < float("inf"):
            raise ConfigurationError(f"max_grad_norm must be a positive number, not {max_grad_norm}.")
        if clipping not in CLIPPINGS:
            raise ConfigurationError(f"unknown clipping {clipping!r}; known are {', '.join(CLIPPINGS)}.")
        self.max_grad_norm, self.clipping = max_grad_norm, clipping

    def plan(self, engine: PerRecordEngine, sampling: Sampling, noise_multiplier: float) -> ReleasePlan:
        """Groups by `clipping`, noise of standard deviation z·C."""
        groups = CLIPPINGS[self.clipping](engine.names, self.max_grad_norm)
        sizes = tuple(parameter.numel() for parameter in engine.parameters)
        return ReleasePlan(sampling, groups, noise_multiplier, sizes)
