"""Vector groups: which parameters are clipped together, and how one total bound is shared among groups.

Every function returns a partition of the parameters. The l2 sensitivity S* of the whole gradient is √(Σ S_g²)
(general_approach_2018, section 2).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence

from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.clipping import Groups, VectorGroup

Partition = dict[str, tuple[int, ...]]
"""Name of a group → positions of its parameters."""

Patterns = Mapping[str, Sequence[str] | str]
"""Name of a group → its pattern or patterns, in the style of a shell."""


def by_layer(names: Sequence[str]) -> Partition:
    """One group for each module that owns parameters; a weight and its bias together."""
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        module, _, _ = name.rpartition(".")
        layers.setdefault(module or name, []).append(position)
    return {layer: tuple(positions) for layer, positions in layers.items()}


def by_pattern(names: Sequence[str], patterns: Patterns) -> Partition:
    """Groups by shell-style patterns of parameter names.

    Args:
        names: Names of the trainable parameters.
        patterns: Name of a group → its pattern or patterns, such as {"conv": "*conv*", "dense": ["*fc1*", "*fc2*"]}.

    Raises:
        ConfigurationError: A parameter is in two groups or in none, or a pattern matches nothing; all are named.
    """
    partition: Partition = {}
    for group, pattern_or_list in patterns.items():
        positions: set[int] = set()
        for pattern in [pattern_or_list] if isinstance(pattern_or_list, str) else pattern_or_list:
            matches = [position for position, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]
            if not matches:
                raise ConfigurationError(
                    f"pattern {pattern!r} of group {group!r} matches no trainable parameter: {', '.join(names)}."
                )
            positions.update(matches)
        partition[group] = tuple(sorted(positions))
    # A parameter in two groups would be added twice, and one in none would have no bound.
    repeated = []
    missing = []
    for position, name in enumerate(names):
        groups = [group for group, members in partition.items() if position in members]
        if len(groups) > 1:
            repeated.append(f"{name} ({' and '.join(groups)})")
        elif not groups:
            missing.append(name)
    if repeated:
        raise ConfigurationError(f"groups overlap: {', '.join(repeated)}; each parameter belongs to exactly one group.")
    if missing:
        raise ConfigurationError(f"no group contains {', '.join(missing)}; add a pattern for it.")
    return partition


def equal_split(partition: Partition, max_grad_norm: float) -> Groups:
    """S_g = S* / √m for each of m groups."""
    # So that the squares of all bounds add up to that of the whole gradient: √(m · S*²/m) = S*.
    bound = max_grad_norm / math.sqrt(max(len(partition), 1))
    return bounded_groups(partition, dict.fromkeys(partition, bound))


def dimension_split(
    partition: Partition,
    sizes: Sequence[int],
    max_grad_norm: float,
) -> Groups:
    """S_g = S* · √(d_g / D): the bound of a group grows with its number of coordinates."""
    dimensions = {name: sum(sizes[position] for position in positions) for name, positions in partition.items()}
    total = sum(dimensions.values())
    bounds = {name: max_grad_norm * math.sqrt(dimension / total) for name, dimension in dimensions.items()}
    return bounded_groups(partition, bounds)


def joint_group(
    partition: Partition,
    scales: Mapping[str, float],
    total: float | None,
) -> Groups:
    """Make one group of k vectors on different scales (general_approach_2018, section 2, "joint clipping").

    Args:
        partition: The k vectors.
        scales: α_j, the expected norm of vector j, for each name of `partition`.
        total: S ∈ [1, √k], the bound of the scaled vectors together; None takes √k, the conservative choice.

    Raises:
        ConfigurationError: A scale is missing or superfluous, or S is out of range.
    """
    _same_names("scales", scales, partition)
    largest = math.sqrt(len(partition))
    if total is None:
        total = largest
    # A √k that was computed elsewhere may be off by its rounding.
    if not 1 <= total <= largest * (1 + 1e-12):
        raise ConfigurationError(
            f"the total bound S of joint clipping must lie in [1, √k] = [1, {largest:.4g}] for k={len(partition)} "
            f"vectors, not {total}: the scales say how large each vector may be."
        )
    # By position: a group holds its parameters in the order of the network, whatever the order of the names.
    scale_of = {}
    for name, positions in partition.items():
        for position in positions:
            scale_of[position] = float(scales[name])
    members = tuple(sorted(scale_of))
    group = VectorGroup(
        name="joint",
        parameters=members,
        max_grad_norm=total,
        scales=tuple(scale_of[position] for position in members),
    )
    return (group,)


def bounded_groups(partition: Partition, bounds: Mapping[str, float]) -> Groups:
    """Groups with a bound S_g each.

    Raises:
        ConfigurationError: A bound is missing or superfluous.
    """
    _same_names("max_grad_norms", bounds, partition)
    return tuple(VectorGroup(name, positions, float(bounds[name])) for name, positions in partition.items())


def _same_names(
    option: str,
    values: Mapping[str, float],
    partition: Partition,
) -> None:
    """Raise ConfigurationError unless an option has a number for each group, and for no other."""
    if values.keys() != partition.keys():
        named = ", ".join(values) or "none"
        raise ConfigurationError(f"{option} must name the groups {', '.join(partition)}; it names {named}.")


def flat_groups(
    names: Sequence[str],
    sizes: Sequence[int],
    max_grad_norm: float,
) -> Groups:
    """One group of all parameters (Abadi et al. 2016, algorithm 1)."""
    return (VectorGroup("all", tuple(range(len(names))), max_grad_norm),)


def per_layer_groups(
    names: Sequence[str],
    sizes: Sequence[int],
    max_grad_norm: float,
) -> Groups:
    """One group for each of m layers, each clipped at `max_grad_norm` / √m."""
    return equal_split(by_layer(names), max_grad_norm)


def per_parameter_groups(
    names: Sequence[str],
    sizes: Sequence[int],
    max_grad_norm: float,
) -> Groups:
    """One group for each of m parameters, weights and biases apart, each clipped at `max_grad_norm` / √m."""
    return equal_split({name: (position,) for position, name in enumerate(names)}, max_grad_norm)


def by_dimension_groups(
    names: Sequence[str],
    sizes: Sequence[int],
    max_grad_norm: float,
) -> Groups:
    """One group for each layer, clipped at `max_grad_norm` · √(d_g / D)."""
    return dimension_split(by_layer(names), sizes, max_grad_norm)


GROUPINGS = {
    "flat": flat_groups,
    "per_layer": per_layer_groups,
    "per_parameter": per_parameter_groups,
    "by_dimension": by_dimension_groups,
}
"""(names, sizes, max_grad_norm) → groups; the l2 norm of the whole clipped gradient is at most `max_grad_norm`."""
