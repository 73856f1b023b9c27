"""Clipping: the formula, and what one record can do to the sum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.parameter import (
    EmbeddingGradients,
    InstantiatedGradients,
    OneRecord,
    OuterProductGradients,
    ParameterGradients,
)
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum, clip_factors, normalize_weights
from dpbench.privacy.mechanism.groups import GROUPINGS, flat_groups, per_layer_groups
from tests.support.reference import mean_square, reference_gradients, relative_error

pytestmark = pytest.mark.usefixtures("tier")

NAMES = ["a.weight", "a.bias", "b.weight"]
SHAPES = [(2, 3), (2,), (4,)]
SIZES = [6, 2, 4]
BOUND = 0.7


def gradients_of(rows: Tensor) -> list[ParameterGradients]:
    """Cut (R, D) rows into parameters of SHAPES."""
    parts = rows.split([math.prod(shape) for shape in SHAPES], 1)
    return [InstantiatedGradients(lambda p=p, s=s: p.reshape(-1, *s)) for p, s in zip(parts, SHAPES, strict=True)]


def total_of(rows: Tensor, groups: tuple[VectorGroup, ...]) -> list[Tensor]:
    sums, _ = clip_and_sum(gradients_of(rows), groups)
    return [torch.cat([sums[i].flatten() for i in group.parameters]) for group in groups]


@pytest.mark.parametrize("bound", [0.1, 100.0])
@pytest.mark.parametrize("broken", [False, True])
def test_one_record_is_clipped_as_a_row(bound: float, broken: bool) -> None:
    """Of any shape and memory layout; one that is not finite counts as zero."""
    gradient = [
        torch.randn(3, 4),
        torch.randn(1),
        torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last),
    ]
    if broken:
        gradient[1] = torch.tensor([math.nan])
    groups = VectorGroup("first", (0, 1), bound), VectorGroup("second", (2,), 2 * bound)
    record, squared = OneRecord.of(gradient)
    rows = [InstantiatedGradients(lambda one=one: one[None]) for one in gradient]
    into = [torch.ones_like(one) for one in gradient]
    expected, norms = clip_and_sum(rows, groups)
    sums, own = clip_and_sum(record, groups)
    assert clip_and_sum(record, groups, into=into)[0][0] is into[0]
    torch.testing.assert_close(own, norms)
    assert squared.isfinite().all() != broken and own.shape == (2, 0 if broken else 1)
    for total, one, new in zip(into, expected, sums, strict=True):
        torch.testing.assert_close(new, one)
        torch.testing.assert_close(total, 1 + one)
    for one, row in zip(record, rows, strict=True):
        torch.testing.assert_close(one.per_record(), row.per_record(), equal_nan=True)


def test_one_record_may_be_a_number() -> None:
    record, squared = OneRecord.of([torch.tensor(3.0), torch.tensor([4.0])])
    (number, rest), _ = clip_and_sum(record, flat_groups(["a", "b"], [1, 1], 1.0))
    assert squared.tolist() == [9.0, 16.0] and number.shape == ()
    assert (float(number), float(rest)) == (pytest.approx(0.6), pytest.approx(0.8))


def test_groups() -> None:
    assert flat_groups(NAMES, SIZES, 2.0) == (VectorGroup("all", (0, 1, 2), 2.0),)
    layers = per_layer_groups(NAMES, SIZES, 2.0)
    assert [(g.name, g.parameters) for g in layers] == [("a", (0, 1)), ("b", (2,))]
    assert math.sqrt(sum(g.max_grad_norm**2 for g in layers)) == pytest.approx(2.0)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigurationError, match="max_grad_norm"):
            flat_groups(NAMES, SIZES, bad)


@pytest.mark.parametrize("clipping", GROUPINGS)
@pytest.mark.parametrize("bound", [1e-3, 0.05, 100.0])
def test_clipped_sum_of_a_network_against_the_reference(clipping: str, bound: float) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()
    x = torch.randn(9, 1, 6, 6, dtype=torch.float64)
    engine = PerRecordEngine(model)
    groups = GROUPINGS[clipping](engine.names, [p.numel() for p in model.parameters()], bound)
    sums, _ = clip_and_sum(engine.backward(mean_square(model, x), 9), groups)
    reference = list(reference_gradients(model, x).values())
    for group in groups:
        rows = torch.cat([reference[i].flatten(1) for i in group.parameters], 1)
        wanted = torch.stack([g * min(1.0, group.max_grad_norm / float(g.norm())) for g in rows]).sum(0)
        assert relative_error(torch.cat([sums[i].flatten() for i in group.parameters]), wanted) < 1e-10


rows_of = st.lists(
    st.lists(
        st.one_of(
            st.floats(-3, 3, width=32),
            st.sampled_from([0.0, 1e-38, 1e19, -1e30, 3e38, math.inf, -math.inf, math.nan]),
        ),
        min_size=12,
        max_size=12,
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=200, deadline=None)
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clipping", GROUPINGS)
def test_records_that_are_not_finite_contribute_zero(bad: float, clipping: str) -> None:
    lot = torch.randn(5, 12)
    poisoned = torch.cat([lot, torch.randn(1, 12)])
    poisoned[-1, 7] = bad
    groups = GROUPINGS[clipping](NAMES, SIZES, BOUND)
    for a, b in zip(total_of(poisoned, groups), total_of(lot, groups), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_network_survives_a_poisoned_record(bad: float) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    x = torch.randn(4, 1, 6, 6)
    x[2] = bad
    engine = PerRecordEngine(model)
    groups = flat_groups(engine.names, [], 1.0)
    sums, _ = clip_and_sum(engine.backward(mean_square(model, x), 4), groups)
    clean, _ = clip_and_sum(engine.backward(mean_square(model, x[[0, 1, 3]]), 3), groups)
    moved = torch.cat([(a - b).flatten() for a, b in zip(sums, clean, strict=True)])
    assert float(moved.norm()) <= 1 + 1e-5


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e12])
@pytest.mark.parametrize("size", [4, 16, 64])
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


@pytest.mark.parametrize("stability", [0.0, 1e-6, 0.01])
def test_normalized_records_stay_within_the_bound_where_squares_underflow(stability: float) -> None:
    rows = torch.full((1, 10**6), 2.6e-23)
    rows[0, 0] = 4e-23
    outer = OuterProductGradients(torch.full((1, 1, 1000), 2.6e-23), torch.full((1, 1, 50), 3.0))
    for gradients in (InstantiatedGradients(lambda: rows), outer):
        weights = normalize_weights(gradients.squared_norms(), 1.0, stability)
        assert float(gradients.weighted_sum(weights).double().norm()) <= 1 + 1e-5


def test_a_tiny_gradient_cannot_hide_behind_a_huge_input() -> None:
    gradients = OuterProductGradients(torch.full((1, 1, 4096), 2.6e-23), torch.full((1, 1, 4096), 2e17))
    weights = clip_factors(gradients.squared_norms(), 0.01)
    assert float(gradients.weighted_sum(weights).double().norm()) <= 0.01 * (1 + 1e-4)


@pytest.mark.parametrize("bound", [1e-30, 1e-11, 1e30])
def test_bounds_beyond_float32_are_refused(bound: float) -> None:
    with pytest.raises(ConfigurationError, match="from 1e-10 to 1e\\+10"):
        VectorGroup("all", (0,), bound)


def test_weights() -> None:
    weights = clip_factors(torch.tensor([0.0, 0.25, 4.0, math.inf, math.nan]), 1.0)
    assert weights.tolist() == [1.0, 1.0, 0.5, 0.0, 0.0]
