"""Differentially private SGD (Abadi et al. 2016), with any torch optimizer."""

from __future__ import annotations

from functools import partial
from typing import Literal

from dpbench.callback.strategy import PrivateStrategy
from dpbench.options import Positive
from dpbench.privacy.mechanism.groups import GROUPINGS
from dpbench.privacy.mechanism.plan import NoiseAllocation
from dpbench.privacy.mechanism.recipe import Grouping, Recipe

Clipping = Literal["flat", "per_layer", "per_parameter", "by_dimension"]


class DPSGD(PrivateStrategy):
    r"""Clip each record's gradient, sum, add Gaussian noise, divide by the expected batch size.

    .. math:: \tilde g = \frac{1}{qN} \Big( \sum_{i \in L} g_i \min(1, C / \|g_i\|_2) + \mathcal N(0, z^2 C^2 I) \Big)

    (Abadi et al. 2016, algorithm 1.) The released gradient goes to `p.grad`; momentum, Adam and schedules are
    post-processing.

    Guarantee: the unit is an example. With Poisson batches neighbors differ by one added or removed example and the l2
    sensitivity is C; with fixed-size batches they differ by one replaced example and it is 2·C, so that the same
    `noise_multiplier` costs more there.

    Args:
        max_grad_norm: C, the bound on a record's l2 norm over all parameters.
        clipping: "flat" clips the whole gradient at C; "per_layer" each of m layers at C/√m; "per_parameter" weights
            and biases apart; "by_dimension" each layer at C·√(d_g/D), by its number of coordinates.
        allocation: How noise is shared among groups, see `privacy.mechanism.NoiseAllocation`; without effect on "flat".

    The other options are those of `StrategyOptions`: noise_multiplier or target_epsilon, delta, accountant, seed, ...

    Example:
        >>> strategy = DPSGD(max_grad_norm=1.0, noise_multiplier=1.1)
        >>> trainer = pl.Trainer(max_steps=1000, callbacks=[strategy])  # doctest: +SKIP
    """

    max_grad_norm: Positive = 1.0
    clipping: Clipping = "flat"
    allocation: NoiseAllocation = "equal"

    def design(self) -> Recipe:
        """Groups by `clipping`; the whole clipped gradient has at most norm C."""
        return Recipe(groups_by(self.clipping, self.max_grad_norm), allocation=self.allocation)


def groups_by(clipping: Clipping, max_grad_norm: float) -> Grouping:
    """Make a way to group parameters; the whole clipped gradient has at most norm `max_grad_norm`."""
    return partial(GROUPINGS[clipping], max_grad_norm=max_grad_norm)
