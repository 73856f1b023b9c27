"""A strategy with an option of its own."""

from __future__ import annotations

from functools import partial

from dpbench.privacy.mechanism.groups import flat_groups
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.strategies import PrivateStrategy


class RadiusDPSGD(PrivateStrategy):
    """DP-SGD whose bound is called a radius.

    Args:
        radius: Bound on a record's norm.
    """

    radius: float = 1.0

    def design(self) -> Recipe:
        """All parameters are clipped together."""
        return Recipe(partial(flat_groups, max_grad_norm=self.radius))
