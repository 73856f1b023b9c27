"""References that are not private: clipping without noise, noise without clipping, and plain averages of users.

The first two show the cost of each half of DP-SGD: bias by clipping, variance by noise.
"""

from __future__ import annotations

from dataclasses import replace

from dpbench.callback.strategy import PrivateStrategy
from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.clipping import unclipped_factors
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.strategies.dpsgd import DPSGD


class _Reference(DPSGD):
    """DP-SGD without one of the parts that make it private."""

    def design(self) -> Recipe:
        """Recipe of `DPSGD`, marked as not private."""
        if self.noise_multiplier is None or self.target_epsilon is not None:
            raise ConfigurationError(
                f"{type(self).__name__} is not private and cannot meet a target_epsilon: leave it out "
                "(target_epsilon=null), and give a noise_multiplier."
            )
        if self.metrics is not None:
            raise ConfigurationError(f"{type(self).__name__} is not private: it has no private metrics.")
        return replace(super().design(), private=False)


class ClipOnly(_Reference):
    """DP-SGD without the noise: the effect of clipping (or discretization, or error correction) alone.

    Guarantee: none; there is no ledger, epsilon is infinite. The options are those of `DPSGD`; the noise_multiplier is
    the one that the error correction would assume.
    """

    noise_multiplier: float | None = 1.0  # of use to an error correction only

    def design(self) -> Recipe:
        """Recipe of `DPSGD` without noise."""
        return replace(super().design(), noise=False)


class NoiseOnly(_Reference):
    """DP-SGD without the clipping: the effect of noise of standard deviation z·C alone.

    Guarantee: none, since one record can move the sum without bound; there is no ledger, epsilon is infinite. The
    options are those of `DPSGD`; the bound max_grad_norm scales the noise only.
    """

    def design(self) -> Recipe:
        """Recipe of `DPSGD` in which every record has the factor 1."""
        return replace(super().design(), clip_factors=unclipped_factors)


class FederatedAveraging(PrivateStrategy):
    """Federated averaging without privacy (McMahan et al. 2017): the reference of private training by user.

    Guarantee: none; there is no ledger, epsilon is infinite. Cohorts, local training and the server's step are those of
    a private strategy with the same `records`; the mean is over the expected number of users, as there.
    """

    noise_multiplier: float | None = 1.0  # of no use

    def design(self) -> Recipe:
        """Recipe in which every record has the factor 1, without noise."""
        if self.target_epsilon is not None or self.metrics is not None:
            raise ConfigurationError("FederatedAveraging is not private: leave out target_epsilon and private metrics.")
        return Recipe(clip_factors=unclipped_factors, noise=False, private=False)
