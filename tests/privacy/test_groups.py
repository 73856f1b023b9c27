"""Vector groups: partitions, splits, the worked example of general_approach_2018, refusals."""

from __future__ import annotations

import math

import pytest

from dpbench.errors import ConfigurationError
from dpbench.privacy.events import effective_noise_multiplier
from dpbench.privacy.mechanism.groups import (
    GROUPINGS,
    bounded_groups,
    by_layer,
    by_pattern,
    dimension_split,
    equal_split,
    joint_group,
)
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.sampling import PoissonSampling

NAMES = ["conv1.weight", "conv1.bias", "conv2.weight", "fc.weight", "fc.bias"]
SIZES = [90, 10, 200, 600, 100]


def test_overlaps_and_gaps_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"groups overlap: conv1.bias \(weights and biases\)"):
        by_pattern(NAMES, {"weights": ["*.weight", "conv1.*"], "biases": "*.bias"})
    with pytest.raises(ConfigurationError, match=r"no group contains fc.weight, fc.bias"):
        by_pattern(NAMES, {"conv": "conv*"})
    with pytest.raises(ConfigurationError, match=r"pattern 'lstm\*' of group 'recurrent' matches no"):
        by_pattern(NAMES, {"all": "*", "recurrent": "lstm*"})


def test_splits_keep_the_total() -> None:
    layers = by_layer(NAMES)
    equal = equal_split(layers, 3.0)
    assert [g.max_grad_norm for g in equal] == pytest.approx([3 / math.sqrt(3)] * 3)
    dimension = dimension_split(layers, SIZES, 3.0)
    assert [g.max_grad_norm for g in dimension] == pytest.approx([3 * math.sqrt(d / 1000) for d in (100, 200, 700)])
    for clipping in GROUPINGS.values():
        assert math.hypot(*(g.max_grad_norm for g in clipping(NAMES, SIZES, 3.0))) == pytest.approx(3.0)


def test_all_allocations_return_the_same_multiplier() -> None:
    """Section 4: σ = z√G·S_g and σ = z√(D/d_g)·S_g both cost z."""
    layers, dimensions = by_layer(NAMES), (100, 200, 700)
    for groups in (equal_split(layers, 2.0), dimension_split(layers, SIZES, 2.0)):
        bounds = [group.max_grad_norm for group in groups]
        wanted = {
            "equal": [1.3 * 2.0] * 3,
            "proportional": [1.3 * math.sqrt(3) * bound for bound in bounds],
            "dimension": [1.3 * math.sqrt(1000 / d) * bound for d, bound in zip(dimensions, bounds, strict=True)],
        }
        for allocation, stds in wanted.items():
            plan = ReleasePlan(PoissonSampling(1000, 0.1), groups, 1.3, tuple(SIZES), allocation=allocation)  # type: ignore[arg-type]
            assert effective_noise_multiplier(plan.queries) == pytest.approx(1.3, rel=1e-12)
            assert plan.noise_stds == pytest.approx(stds)


def test_a_joint_total_lies_between_one_and_the_conservative_default() -> None:
    partition = {"a": (0,), "b": (1,), "c": (2,)}
    scales = {"a": 1.0, "b": 2.0, "c": 3.0}
    for total in (0.99, 1.74, -1.0, math.nan):
        with pytest.raises(ConfigurationError, match=r"must lie in \[1, √k\] = \[1, 1.732\]"):
            joint_group(partition, scales, total)
    (group,) = joint_group(partition, scales, None)
    assert group.max_grad_norm == pytest.approx(math.sqrt(3))
    assert group.scales == (1.0, 2.0, 3.0)


def test_names_of_bounds_and_scales() -> None:
    partition = {"a": (0,), "b": (1,)}
    with pytest.raises(ConfigurationError, match="scales must name the groups a, b; it names a"):
        joint_group(partition, {"a": 1.0}, 1.0)
    with pytest.raises(ConfigurationError, match="max_grad_norms must name the groups a, b; it names a, c"):
        bounded_groups(partition, {"a": 1.0, "c": 1.0})
    assert [g.max_grad_norm for g in bounded_groups(partition, {"b": 2.0, "a": 1.0})] == [1.0, 2.0]
    for bad in (0.0, math.nan, 1e-11, 1e11):
        with pytest.raises(ConfigurationError, match="max_grad_norm .* from 1e-10 to 1e\\+10"):
            bounded_groups(partition, {"a": bad, "b": 1.0})
    with pytest.raises(ConfigurationError, match="scales of group joint must be positive"):
        joint_group(partition, {"a": 1.0, "b": 0.0}, 1.0)
