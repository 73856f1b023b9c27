"""Clipping: the formula, and what one record can do to the sum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpbench.privacy.gradients.parameter import (
    EmbeddingGradients,
    InstantiatedGradients,
    OneRecord,
    OuterProductGradients,
)
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum, clip_factors, normalize_weights
from dpbench.privacy.mechanism.groups import GROUPINGS
from tests.privacy.mechanisms import DIMENSION, NAMES, SIZES, gradients_of

BOUND = 0.7


def total_of(rows: Tensor, groups: tuple[VectorGroup, ...]) -> list[Tensor]:
    sums, _ = clip_and_sum(gradients_of(rows), groups)
    return [torch.cat([sums[i].flatten() for i in group.parameters]) for group in groups]


@pytest.mark.parametrize(("bound", "broken"), [(0.1, False), (100.0, False), (0.1, True)])
def test_one_record_is_clipped_as_a_row(bound: float, broken: bool) -> None:
    """Of any shape and memory layout; one that is not finite counts as zero."""
    images = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    gradient = [torch.randn(3, 4), torch.tensor(math.nan if broken else 3.0), images]
    groups = VectorGroup("first", (0, 1), bound), VectorGroup("second", (2,), 2 * bound)
    record, squared = OneRecord.of(gradient)
    rows = [InstantiatedGradients(lambda one=one: one[None]) for one in gradient]
    into = [torch.ones_like(one) for one in gradient]
    expected, norms = clip_and_sum(rows, groups)
    sums, own = clip_and_sum(record, groups)
    assert clip_and_sum(record, groups, into=into)[0][0] is into[0]
    torch.testing.assert_close(own, norms)
    assert squared.isfinite().all() != broken and own.shape == (2, 0 if broken else 1)
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(into, [1 + one for one in expected])
    for one, row in zip(record, rows, strict=True):
        torch.testing.assert_close(one.per_record(), row.per_record(), equal_nan=True)


rows_of = st.lists(
    st.lists(
        st.one_of(
            st.floats(-3, 3, width=32),
            st.sampled_from([0.0, 1e-38, 1e19, -1e30, 3e38, math.inf, -math.inf, math.nan]),
        ),
        min_size=DIMENSION,
        max_size=DIMENSION,
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(rows=rows_of, clipping=st.sampled_from(list(GROUPINGS)), which=st.integers(0, 5))
def test_one_record_moves_the_sum_by_at_most_the_sensitivity(
    rows: list[list[float]], clipping: str, which: int
) -> None:
    lot = torch.tensor(rows, dtype=torch.float32)
    without = torch.cat([lot[: which % len(lot)], lot[which % len(lot) + 1 :]])
    groups = GROUPINGS[clipping](NAMES, SIZES, BOUND)
    moved = [a - b for a, b in zip(total_of(lot, groups), total_of(without, groups), strict=True)]
    for group, difference in zip(groups, moved, strict=True):
        assert float(difference.norm()) <= group.max_grad_norm * (1 + 1e-5)
    assert float(torch.cat(moved).norm()) <= BOUND * (1 + 1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_records_that_are_not_finite_contribute_zero(bad: float) -> None:
    lot = torch.randn(5, DIMENSION)
    poisoned = torch.cat([lot, torch.randn(1, DIMENSION)])
    poisoned[-1, 7] = bad
    for grouping in GROUPINGS.values():
        groups = grouping(NAMES, SIZES, BOUND)
        torch.testing.assert_close(total_of(poisoned, groups), total_of(lot, groups))


@pytest.mark.parametrize(("size", "scale"), [(4, 1.0), (64, 1e12)])
def test_records_whose_positions_cancel_are_still_clipped(size: int, scale: float) -> None:
    """The norm is computed otherwise than the sum; rounding must not let a record pass as small."""
    big = scale * torch.randn(1, size)
    a = torch.randn(1, 1, size)
    a = torch.cat([a, a * (1 + 1e-5)], 1)
    g = torch.stack([big, -big], 1)
    forms = [
        OuterProductGradients(g, a),
        EmbeddingGradients(torch.stack([big, -big * (1 - 1e-5)], 1), torch.zeros(1, 2).long(), 3),
    ]
    for gradients in forms:
        weights = clip_factors(gradients.squared_norms(), 1.0)
        assert float(gradients.weighted_sum(weights).norm()) <= 1 + 1e-3


def test_normalized_records_stay_within_the_bound_where_squares_underflow() -> None:
    rows = torch.full((1, 10**6), 2.6e-23)
    rows[0, 0] = 4e-23
    outer = OuterProductGradients(torch.full((1, 1, 1000), 2.6e-23), torch.full((1, 1, 50), 3.0))
    for gradients in (InstantiatedGradients(lambda: rows), outer):
        weights = normalize_weights(gradients.squared_norms(), 1.0, stability=0.0)
        assert float(gradients.weighted_sum(weights).double().norm()) <= 1 + 1e-5


def test_a_tiny_gradient_cannot_hide_behind_a_huge_input() -> None:
    gradients = OuterProductGradients(torch.full((1, 1, 4096), 2.6e-23), torch.full((1, 1, 4096), 2e17))
    weights = clip_factors(gradients.squared_norms(), 0.01)
    assert float(gradients.weighted_sum(weights).double().norm()) <= 0.01 * (1 + 1e-4)
