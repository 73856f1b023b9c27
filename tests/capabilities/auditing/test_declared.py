"""Two-sided tests of noise, sensitivity and lots: right at their level, sharp, and silent where there is nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from dpbench.capabilities.auditing.declared import least_ratio, participation, release_game
from dpbench.capabilities.canaries.scores import ScoreSums
from tests.capabilities.auditing.worlds import World

WORLD = World(z=1.5, releases=40, canaries=500, noise=0.9, move=1.2)


def test_game_is_a_two_sample_comparison_where_all_releases_are_alike() -> None:
    member, x, drawn = WORLD.seen(0)
    game = release_game(WORLD.scores(0).game, 0.1)
    inside, outside = x[drawn & member], x[~(drawn & member)]
    interval = stats.ttest_ind(inside, outside).confidence_interval(0.9)
    expected = [inside.mean() - outside.mean(), interval.low, interval.high]
    assert [game.move.value, game.move.low, game.move.high] == pytest.approx(expected, rel=1e-9)  # type: ignore[union-attr]


def test_limits_miss_the_truth_as_often_as_they_may() -> None:
    """Also where the declared noise differs from release to release."""
    missed: Counter[str] = Counter()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        member = rng.random(200) < 0.5
        sums = ScoreSums(member)
        for z in 1 + 0.1 * np.arange(20):
            drawn = member & (rng.random(200) < 0.2)
            sums.add(drawn + z * rng.standard_normal(200), drawn, z, 0.2)
        game = release_game(sums.scores().game, 0.1)
        assert game is not None
        missed["noise"] += not game.noise.low < 1 < game.noise.high
        missed["move"] += not game.move.low < 1 < game.move.high
        missed["errors"] += least_ratio(sums.scores().game, 0.05) > 1
    assert all(5 <= missed[name] <= stats.binom.isf(1e-3, 200, 0.1) for name in ("noise", "move"))  # 20 expected
    assert missed["errors"] <= stats.binom.isf(1e-3, 200, 0.05)


def test_where_there_is_nothing_to_test_nothing_is_tested() -> None:
    for member, tested in (([True, False], {"rate"}), ([False] * 50, set())):
        sums = ScoreSums(np.array(member))
        sums.add(np.ones(len(member)), np.zeros(len(member), bool), 1.0, 0.5)
        assert release_game(sums.seen.game, 0.05) is None
        assert {name for name, check in participation(sums.seen).items() if check is not None} == tested
    everybody = World(rate=1.0, releases=20, noise=0.0).scores()
    assert participation(everybody)["dispersion"] is None
    assert release_game(everybody.game, 0.05).mu > 1e5  # type: ignore[union-attr]
