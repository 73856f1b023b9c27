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
    partition: Partition = {}
    for layer, positions in layers.items():
        partition[layer] = tuple(positions)
    return partition


def by_pattern(names: Sequence[str], patterns: Patterns) -> Partition:
    """Groups by shell-style patterns of parameter names.

    Args:
        names: Names of the trainable parameters.
        patterns: Name of a group → its pattern or patterns, such as {"conv": "*conv*", "dense": ["*fc1*", "*fc2*"]}.

    Raises:
        ConfigurationError: A parameter is in two groups or in none, or a pattern matches nothing; all are named.
    """
    _check_patterns(patterns)
    partition: Partition = {}
    for group, pattern_or_list in patterns.items():
        positions: set[int] = set()
        for pattern in _as_list(pattern_or_list):
            matches = _matches(names, pattern)
            if not matches:
                raise ConfigurationError(
                    f"pattern {pattern!r} of group {group!r} matches no trainable parameter: {', '.join(names)}."
                )
            positions.update(matches)
        partition[group] = tuple(sorted(positions))
    # A parameter in two groups would be added twice, and one in none would have no bound.
    _refuse_overlaps(names, partition)
    return partition


def _as_list(pattern_or_list: Sequence[str] | str) -> Sequence[str]:
    if isinstance(pattern_or_list, str):
        return [pattern_or_list]
    return pattern_or_list


def _matches(names: Sequence[str], pattern: str) -> list[int]:
    """Positions of the parameters whose names match a pattern."""
    positions = []
    for position, name in enumerate(names):
        if fnmatch.fnmatchcase(name, pattern):
            positions.append(position)
    return positions


def _refuse_overlaps(names: Sequence[str], partition: Partition) -> None:
    """Raise ConfigurationError unless each parameter is in exactly one group."""
    repeated = []
    missing = []
    for position, name in enumerate(names):
        groups = []
        for group, positions in partition.items():
            if position in positions:
                groups.append(group)
        if len(groups) > 1:
            repeated.append(f"{name} ({' and '.join(groups)})")
        elif not groups:
            missing.append(name)
    if repeated:
        raise ConfigurationError(f"groups overlap: {', '.join(repeated)}; each parameter belongs to exactly one group.")
    if missing:
        raise ConfigurationError(f"no group takes {', '.join(missing)}; add a group with a pattern for it.")


def _check_patterns(patterns: Patterns) -> None:
    """Raise ConfigurationError unless each group has a pattern or a list of patterns."""
    if not isinstance(patterns, Mapping) or not patterns:
        raise ConfigurationError(
            'groups must be names with patterns, such as {conv: "*conv*", dense: ["*fc1*", "*fc2*"]}, not '
            f"{patterns!r}; leave it out (null) for one group for each layer."
        )
    for group, value in patterns.items():
        if isinstance(value, str):
            continue
        is_list = isinstance(value, list | tuple) and len(value) > 0
        if not is_list or not all(isinstance(pattern, str) for pattern in value):
            raise ConfigurationError(f"group {group!r} must be a pattern or a list of patterns, not {value!r}.")


def equal_split(partition: Partition, max_grad_norm: float) -> Groups:
    """S_g = S* / √m for each of m groups."""
    count = max(len(partition), 1)
    # So that the squares of all bounds add up to that of the whole gradient: √(m · S*²/m) = S*.
    bound = max_grad_norm / math.sqrt(count)
    groups = []
    for name, positions in partition.items():
        groups.append(VectorGroup(name, positions, bound))
    return tuple(groups)


def dimension_split(
    partition: Partition,
    sizes: Sequence[int],
    max_grad_norm: float,
) -> Groups:
    """S_g = S* · √(d_g / D): the bound of a group grows with its number of coordinates."""
    dimensions = {}
    for name, positions in partition.items():
        dimensions[name] = sum(sizes[position] for position in positions)
    total = sum(dimensions.values())
    groups = []
    for name, positions in partition.items():
        bound = max_grad_norm * math.sqrt(dimensions[name] / total)
        groups.append(VectorGroup(name, positions, bound))
    return tuple(groups)


def joint_group(
    partition: Partition,
    scales: Mapping[str, float],
    total: float | None,
) -> Groups:
    """One group whose k vectors live on different scales (general_approach_2018, section 2, "joint clipping").

    Args:
        partition: The k vectors.
        scales: α_j, the norm that vector j is expected to have; one for each name of `partition`.
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
    groups = []
    for name, positions in partition.items():
        bound = float(bounds[name])
        groups.append(VectorGroup(name, positions, bound))
    return tuple(groups)


def _same_names(
    option: str,
    values: Mapping[str, float],
    partition: Partition,
) -> None:
    """Raise ConfigurationError unless an option has a number for each group, and for no other."""
    is_mapping = isinstance(values, Mapping)
    if not is_mapping or not all(isinstance(value, int | float) for value in values.values()):
        raise ConfigurationError(
            f"{option} must be a number for each group, such as {{conv: 1, dense: 2}}, not {values!r}."
        )
    if values.keys() != partition.keys():
        named = ", ".join(values) or "none"
        raise ConfigurationError(f"{option} must name the groups {', '.join(partition)}; it names {named}.")


def flat_groups(
    names: Sequence[str],
    sizes: Sequence[int],
    max_grad_norm: float,
) -> Groups:
    """One group of all parameters (Abadi et al. 2016, algorithm 1)."""
    positions = tuple(range(len(names)))
    group = VectorGroup("all", positions, max_grad_norm)
    return (group,)


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
    partition: Partition = {}
    for position, name in enumerate(names):
        partition[name] = (position,)
    return equal_split(partition, max_grad_norm)


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
