"""What an auditor adds up: exact sums, continued bit-identically, kept in JSON, and safe from broken mechanisms."""

from __future__ import annotations

import json
import time
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


@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("reach", [1.0, 0.5])
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
    scores, z, q = world.scores(3), world.z, world.rate
    np.testing.assert_allclose(scores.llr, log_likelihood_ratio(x, z, q, replace_one).sum(0))
    np.testing.assert_array_equal(scores.drawn, drawn.sum(0))
    move = np.where(drawn, np.where(member, 0.5, -0.5) if replace_one else 1.0, 0.0) / z
    e, game = x / z - move, scores.game
    inside, outside = drawn & member, drawn & ~member if replace_one else ~(drawn & member)
    middle = 0.0 if replace_one else 0.5
    assert (game.ins, game.misses) == (inside.sum(), (x[inside] <= middle).sum())
    assert (game.outs, game.alarms) == (outside.sum(), (x[outside] > middle).sum())
    sums = [game.move, game.move_squared, game.residual, game.residual_squared, game.product]
    np.testing.assert_allclose(sums, [move.sum(), (move**2).sum(), e.sum(), (e**2).sum(), (move * e).sum()])
    assert (game.count, scores.releases) == (x.size, len(x))
    assert game.most_mu == pytest.approx(1 / z)
    assert scores.lots.mean == pytest.approx(7 * q) and scores.lots.variance == pytest.approx(7 * q * (1 - q))


@pytest.mark.parametrize("replace_one", [False, True])
def test_continuation_from_a_checkpoint_is_bit_identical(replace_one: bool) -> None:
    world = replace(SMALL, replace_one=replace_one)
    member, x, drawn = world.seen(0)
    first = ScoreSums(member, replace_one)
    for t in range(4):
        first.add(x[t], drawn[t], 1.0, world.rate)
    second = ScoreSums(member, replace_one)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert same(first.scores(), second.scores())
    for t in range(4, 7):
        second.add(x[t], drawn[t], 1.0, world.rate)
    assert same(second.scores(), world.scores(0)) and not same(first.scores(), second.scores())
    with pytest.raises(ValueError, match="other canaries"):
        ScoreSums(~member, replace_one).load_state_dict(first.state_dict())


def test_json_round_trip_is_exact() -> None:
    scores = SMALL.scores()
    again = Scores.model_validate(json.loads(json.dumps(scores.model_dump(), allow_nan=False)))
    assert same(again, scores)
    assert again.member.dtype == np.bool_ and again.drawn.dtype == np.int64 and again.canaries == 30


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("llr", [1.0], "differ in length"),
        ("llr", ["one"], "llr.*something else than rows of finite numbers"),
        ("llr", [float("nan")], "llr.*something else than rows of finite numbers"),
        ("member", [0, 1], "member.*something else than true and false"),
        ("drawn", [0.5], "drawn.*something else than whole numbers"),
        ("releases", 2.5, "releases"),
        ("replace_one", 1, "replace_one"),
        ("lots", {"mean": "much"}, "lots.mean"),
        ("game", None, "game"),
    ],
)
def test_damaged_json_is_named(place: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        Scores.model_validate(SMALL.scores().model_dump() | {place: value})


def test_files_of_earlier_versions_are_read() -> None:
    """With what they had of checks that are gone, and a checkpoint's scores among other arrays."""
    sums = SMALL.sums()
    kept = sums.state_dict()
    gone = {"centred": [0.0] * 30, "correlation": {"pairs": 3, "product": 0.5}}
    assert same(Scores.model_validate(kept | gone), sums.scores())
    llr = kept.pop("llr")
    earlier = kept | gone | {"per_canary": {"llr": llr, "mean": llr}, "expected": 0.1}
    assert same(ScoreSums.of(json.loads(json.dumps(earlier))).scores(), sums.scores())


def test_what_is_not_finite_or_huge_is_counted_and_cut() -> None:
    sums = ScoreSums(np.array([True, False, True, False]))
    for _ in range(3):
        sums.add(np.array([np.inf, -np.inf, np.nan, 1e300]), np.array([True, False, False, False]), 1e-3, 0.5)
    scores = sums.scores()
    assert scores.not_finite == 9
    json.dumps(scores.model_dump(), allow_nan=False)
    assert scores.llr[0] == scores.llr[3] and scores.llr[0] == pytest.approx(3 * LIMIT * 1e6, rel=1e-3)


def test_memory_and_time_do_not_grow_with_the_releases() -> None:
    sums, x, drawn = ScoreSums(np.ones(2000, bool)), np.zeros(2000), np.zeros(2000, dtype=bool)
    sums.add(x, drawn, 1.0, 0.1)
    size = len(json.dumps(sums.state_dict()))
    began = time.process_time()
    for _ in range(200):
        sums.add(x, drawn, 1.0, 0.1)
    assert time.process_time() - began < 2  # measured: 0.05
    assert len(json.dumps(sums.state_dict())) < 3 * size
