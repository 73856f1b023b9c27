"""Vector groups: separate or joint clipping of named groups of parameters (general_approach_2018)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dpbench.callback.strategy import PrivateStrategy
from dpbench.errors import ConfigurationError
from dpbench.options import Positive
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.groups import (
    bounded_groups,
    by_layer,
    by_pattern,
    dimension_split,
    equal_split,
    joint_group,
)
from dpbench.privacy.mechanism.plan import NoiseAllocation
from dpbench.privacy.mechanism.recipe import Recipe


class VectorGroups(PrivateStrategy):
    r"""DP-SGD with a bound and a noise for each group of parameters.

    Separate clipping: group g is clipped at S_g, from one total S* as S*/√m ("equal") or S*·√(d_g/D) ("dimension"), or
    given for each group. Joint clipping: each vector j is divided by its scale α_j, all together are clipped at
    S ∈ [1, √k], and multiplied by α_j again. Noise: the same on every coordinate ("equal"),
    :math:`\tilde\sigma_g = z \sqrt G S_g` ("proportional"), or :math:`z \sqrt{D/d_g} S_g` ("dimension"); for joint
    clipping α_j·z·S on vector j. All cost the same z = (Σ (S_g/σ̃_g)²)^(-1/2) (sections 2 and 4 of the paper).

    Guarantee: that of `DPSGD` with the same `noise_multiplier`.

    Args:
        groups: Name → pattern or list of patterns of parameter names, such as {"conv": "*conv*", "dense": ["*fc*"]};
            each parameter in exactly one. None: one for each layer.
        split: "equal" or "dimension" share `max_grad_norm` among groups; "joint" clips all together by `scales`.
        max_grad_norm: S*, or S for joint clipping (None there takes √k; elsewhere 1).
        max_grad_norms: S_g by group, instead of `split` and `max_grad_norm`.
        scales: α_j by group, for joint clipping.
        allocation: How noise is shared among groups.
    """

    groups: dict[str, str | Sequence[str]] | None = None
    split: Literal["equal", "dimension", "joint"] = "dimension"
    max_grad_norm: Positive | None = None
    max_grad_norms: dict[str, float] | None = None
    scales: dict[str, float] | None = None
    allocation: NoiseAllocation = "proportional"

    def design(self) -> Recipe:
        """Groups by pattern or layer, with their bounds."""
        if (self.split == "joint") != (self.scales is not None):
            raise ConfigurationError("scales and split=joint belong together: give one scale for each group.")
        if self.max_grad_norms is not None and (self.max_grad_norm is not None or self.split == "joint"):
            raise ConfigurationError(
                "give max_grad_norm (with a split) or max_grad_norms (one for each group), not both."
            )
        return Recipe(self._partition, allocation=self.allocation)

    def _partition(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[VectorGroup, ...]:
        partition = by_layer(names) if self.groups is None else by_pattern(names, self.groups)
        if self.split == "joint":
            return joint_group(partition, self.scales or {}, self.max_grad_norm)
        if self.max_grad_norms is not None:
            return bounded_groups(partition, self.max_grad_norms)
        total = 1.0 if self.max_grad_norm is None else self.max_grad_norm
        return equal_split(partition, total) if self.split == "equal" else dimension_split(partition, sizes, total)
