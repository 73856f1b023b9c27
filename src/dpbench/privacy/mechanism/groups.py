"""Vector groups: which parameters are clipped together, and how one total bound is shared among groups.

Every function returns a partition of the parameters. The l2 sensitivity S* of the whole gradient is √(Σ S_g²)
(general_approach_2018, section 2).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence

from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.clipping import VectorGroup

Partition = dict[str, tuple[int, ...]]
"""Name of a group → positions of its parameters."""


def by_layer(names: Sequence[str]) -> Partition:
    """One group for each module that owns parameters; a weight and its bias together."""
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        layers.setdefault(name.rpartition(".")[0] or name, []).append(position)
    return {layer: tuple(positions) for layer, positions in layers.items()}


def by_pattern(names: Sequence[str], patterns: Mapping[str, Sequence[str] | str]) -> Partition:
    """Groups by shell-style patterns of parameter names.

    Args:
        names: Names of the trainable parameters.
        patterns: Name of a group → its pattern or patterns, such as {"conv": "*conv*", "dense": ["*fc1*", "*fc2*"]}.

    Raises:
        ConfigurationError: A parameter is in two groups or in none, or a pattern matches nothing; all are named.
    """
    _check_patterns(patterns)
    partition: dict[str, list[int]] = {group: [] for group in patterns}
    owners: list[list[str]] = [[] for _ in names]
    for group, value in patterns.items():
        for pattern in [value] if isinstance(value, str) else value:
            matched = [position for position, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern)]
            if not matched:
                raise ConfigurationError(
                    f"pattern {pattern!r} of group {group!r} matches no trainable parameter: {', '.join(names)}."
                )
            for position in matched:
                if group not in owners[position]:
                    owners[position].append(group)
                    partition[group].append(position)
    twice = [f"{name} ({' and '.join(own)})" for name, own in zip(names, owners, strict=True) if len(own) > 1]
    missed = [name for name, own in zip(names, owners, strict=True) if not own]
    if twice:
        raise ConfigurationError(f"groups overlap: {', '.join(twice)}; each parameter belongs to exactly one group.")
    if missed:
        raise ConfigurationError(f"no group takes {', '.join(missed)}; add a group with a pattern for it.")
    return {group: tuple(sorted(positions)) for group, positions in partition.items()}


def _check_patterns(patterns: Mapping[str, Sequence[str] | str]) -> None:
    if not isinstance(patterns, Mapping) or not patterns:
        raise ConfigurationError(
            'groups must be names with patterns, such as {conv: "*conv*", dense: ["*fc1*", "*fc2*"]}, not '
            f"{patterns!r}; leave it out (null) for one group for each layer."
        )
    for group, value in patterns.items():
        if not (isinstance(value, str) or (isinstance(value, list | tuple) and value)) or not all(
            isinstance(pattern, str) for pattern in value
        ):
            raise ConfigurationError(f"group {group!r} must be a pattern or a list of patterns, not {value!r}.")


def equal_split(partition: Partition, max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """S_g = S* / √m for each of m groups."""
    bound = max_grad_norm / math.sqrt(len(partition)) if partition else max_grad_norm
    return tuple(VectorGroup(name, positions, bound) for name, positions in partition.items())


def dimension_split(partition: Partition, sizes: Sequence[int], max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """S_g = S* · √(d_g / D): the bound of a group grows with its number of coordinates."""
    dimensions = {name: sum(sizes[position] for position in members) for name, members in partition.items()}
    total = sum(dimensions.values())
    return tuple(
        VectorGroup(name, members, max_grad_norm * math.sqrt(dimensions[name] / total))
        for name, members in partition.items()
    )


def joint_group(partition: Partition, scales: Mapping[str, float], total: float | None) -> tuple[VectorGroup, ...]:
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
    total = largest if total is None else total
    if not 1 <= total <= largest * (1 + 1e-12):
        raise ConfigurationError(
            f"the total bound S of joint clipping must lie in [1, √k] = [1, {largest:.4g}] for k={len(partition)} "
            f"vectors, not {total}: the scales say how large each vector may be."
        )
    members = [(position, float(scales[name])) for name, positions in partition.items() for position in positions]
    positions, alphas = zip(*sorted(members), strict=True)
    return (VectorGroup("joint", positions, total, alphas),)


def bounded_groups(partition: Partition, bounds: Mapping[str, float]) -> tuple[VectorGroup, ...]:
    """Groups with a bound S_g each.

    Raises:
        ConfigurationError: A bound is missing or superfluous.
    """
    _same_names("max_grad_norms", bounds, partition)
    return tuple(VectorGroup(name, members, float(bounds[name])) for name, members in partition.items())


def _same_names(option: str, given: Mapping[str, float], partition: Partition) -> None:
    numbers = isinstance(given, Mapping) and all(isinstance(value, int | float) for value in given.values())
    if not numbers:
        raise ConfigurationError(
            f"{option} must be a number for each group, such as {{conv: 1, dense: 2}}, not {given!r}."
        )
    if given.keys() != partition.keys():
        raise ConfigurationError(
            f"{option} must name the groups {', '.join(partition)}; it names {', '.join(given) or 'none'}."
        )


def flat_groups(names: Sequence[str], sizes: Sequence[int], max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """One group of all parameters (Abadi et al. 2016, algorithm 1)."""
    return (VectorGroup("all", tuple(range(len(names))), max_grad_norm),)


def per_layer_groups(names: Sequence[str], sizes: Sequence[int], max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """One group for each of m layers, each clipped at `max_grad_norm` / √m."""
    return equal_split(by_layer(names), max_grad_norm)


def per_parameter_groups(names: Sequence[str], sizes: Sequence[int], max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """One group for each of m parameters, weights and biases apart, each clipped at `max_grad_norm` / √m."""
    return equal_split({name: (position,) for position, name in enumerate(names)}, max_grad_norm)


def by_dimension_groups(names: Sequence[str], sizes: Sequence[int], max_grad_norm: float) -> tuple[VectorGroup, ...]:
    """One group for each layer, clipped at `max_grad_norm` · √(d_g / D)."""
    return dimension_split(by_layer(names), sizes, max_grad_norm)


GROUPINGS = {
    "flat": flat_groups,
    "per_layer": per_layer_groups,
    "per_parameter": per_parameter_groups,
    "by_dimension": by_dimension_groups,
}
"""(names, sizes, max_grad_norm) → groups; the l2 norm of the whole clipped gradient is at most `max_grad_norm`."""
