"""What an auditor adds up: exact sums, continued bit-identically, kept in JSON, and safe from broken mechanisms."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpbench.capabilities.canaries.scores import LIMIT, Scores, ScoreSums, log_likelihood_ratio
from tests.capabilities.auditing.worlds import World

SMALL = World(releases=7, canaries=30, rate=0.3)


def same(one: Scores, other: Scores) -> bool:
    return json.dumps(one.model_dump()) == json.dumps(other.model_dump())


@pytest.mark.parametrize(("rate", "reach"), [(0.1, 0.5), (1.0, 1.0)])
def test_the_ratio_is_that_of_the_mixtures(rate: float, reach: float) -> None:
    x, z = np.linspace(-2, 3, 11), 0.7

    def density(move: float) -> Any:
        return (1 - rate) * stats.norm.pdf(x, 0, z) + rate * stats.norm.pdf(x, move, z)

    added = np.log(density(reach) / stats.norm.pdf(x, 0, z))
    np.testing.assert_allclose(log_likelihood_ratio(x, z, rate, reach=reach), added, atol=1e-12)
    replaced = np.log(density(reach / 2) / density(-reach / 2))
    np.testing.assert_allclose(log_likelihood_ratio(x, z, rate, True, reach), replaced, atol=1e-12)


@pytest.mark.parametrize("replace_one", [False, True])
def test_sums_are_those_of_all_observations_at_once(replace_one: bool) -> None:
    world = replace(SMALL, z=0.8, replace_one=replace_one)
    member, x, drawn = world.seen(3)
    scores, q = world.scores(3), world.rate
    np.testing.assert_allclose(scores.llr, log_likelihood_ratio(x, 0.8, q, replace_one).sum(0))
    np.testing.assert_array_equal(scores.drawn, drawn.sum(0))
    inside, outside = drawn & member, drawn & ~member if replace_one else ~(drawn & member)
    middle, game = 0.0 if replace_one else 0.5, scores.game
    assert (game.ins, game.misses) == (inside.sum(), (x[inside] <= middle).sum())
    assert (game.outs, game.alarms) == (outside.sum(), (x[outside] > middle).sum())
    assert game.most_mu == pytest.approx(1 / 0.8)
    lots, variance = scores.lots, q * (1 - q)
    expected = 7 * q, 7 * variance, 7 * variance * (1 - 6 * variance)
    assert (lots.mean, lots.variance, lots.cumulant) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("llr", [1.0]),
        ("llr", [float("nan")] * 30),
        ("member", [2] * 30),
        ("game", None),
        ("residuals", replace(SMALL, canaries=29).scores().model_dump()["residuals"]),
    ],
)
def test_damaged_json_is_named(place: str, value: object) -> None:
    kept = json.loads(json.dumps(SMALL.scores().model_dump(), allow_nan=False))
    assert same(Scores.model_validate(kept), SMALL.scores())
    with pytest.raises(ValueError, match=place):
        Scores.model_validate(kept | {place: value})


def test_files_of_earlier_versions_are_read() -> None:
    """With what they had of checks that are gone, and a checkpoint's scores among other arrays."""
    sums = SMALL.sums()
    kept = sums.state_dict() | {"centred": [0.0] * 30, "correlation": {"pairs": 3, "product": 0.5}}
    assert same(Scores.model_validate(kept), sums.scores())
    llr = kept.pop("llr")
    earlier = kept | {"per_canary": {"llr": llr, "mean": llr}, "expected": 0.1}
    assert same(ScoreSums.of(json.loads(json.dumps(earlier))).scores(), sums.scores())


def test_what_is_not_finite_or_huge_is_counted_and_cut() -> None:
    sums = ScoreSums(np.array([True] * 4))
    sums.add(np.array([np.inf, -np.inf, np.nan, 1e300]), np.array([True, False, False, False]), 1e-3, 0.5)
    scores = sums.scores()
    assert scores.not_finite == 3
    json.dumps(scores.model_dump(), allow_nan=False)
    assert scores.llr[0] == scores.llr[3] == pytest.approx(LIMIT * 1e6, rel=1e-3)
