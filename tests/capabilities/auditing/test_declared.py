"""Two-sided tests of noise, sensitivity and lots: right at their level, sharp, and silent where there is nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dpbench.capabilities.auditing.declared import least_ratio, participation, release_game
from dpbench.capabilities.canaries.scores import ScoreSums
from tests.capabilities.auditing.worlds import World

WORLD = World(z=1.5, releases=40, canaries=500)


@pytest.mark.parametrize("replace_one", [False, True])
def test_game_is_a_two_sample_comparison_where_all_releases_are_alike(replace_one: bool) -> None:
    """With replacement the observations of those who were not drawn tell of the noise and the middle too."""
    world = replace(WORLD, noise=0.9, move=1.2, rate=0.5 if replace_one else 0.05, replace_one=replace_one)
    member, x, drawn = world.seen(0)
    game = release_game(world.scores(0).game, 0.1)
    assert game is not None and game.mu == pytest.approx(1.2 / 0.9 / 1.5, rel=0.05)
    if not replace_one:
        inside, outside = x[drawn & member], x[~(drawn & member)]
        test = stats.ttest_ind(inside, outside)
        interval = test.confidence_interval(0.9)
        assert [game.move.value, game.move.low, game.move.high] == pytest.approx(
            [inside.mean() - outside.mean(), interval.low, interval.high], rel=1e-9
        )
    assert game.noise.low < 0.9 < game.noise.high and game.noise.high < 1.02 * game.noise.low
    assert game.move.low < 1.2 < game.move.high
    assert 1 < least_ratio(world.scores(0).game, 0.05) < 1.2 / 0.9


@pytest.mark.parametrize("varied", [False, True])
def test_limits_miss_the_truth_as_often_as_they_may(varied: bool) -> None:
    """Also where the declared noise differs from release to release."""
    missed: Counter[str] = Counter()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        member = rng.random(200) < 0.5
        sums = ScoreSums(member)
        for step in range(20):
            z = 1 + 0.1 * step if varied else 1.0
            drawn = member & (rng.random(200) < 0.2)
            sums.add(drawn + z * rng.standard_normal(200), drawn, z, 0.2)
        game = release_game(sums.scores().game, 0.1)
        assert game is not None
        for name in ("noise", "move"):
            limits = getattr(game, name)
            missed[name] += not limits.low < 1 < limits.high
        missed["errors"] += least_ratio(sums.scores().game, 0.05) > 1
    assert all(missed[name] <= stats.binom.isf(1e-3, 200, 0.1) for name in ("noise", "move"))
    assert missed["errors"] <= stats.binom.isf(1e-3, 200, 0.05)
    assert min(missed[name] for name in ("noise", "move")) >= 5  # of 20 expected


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (World(releases=100, drawn_rate=1.2), {"rate"}),
        (World(releases=100, shuffled=True), {"dispersion"}),
        (World(releases=100), set()),
        (World(releases=100, noise=0.5), set()),
        (World(releases=100, replace_one=True), set()),
        (World(releases=100, replace_one=True, shuffled=True), {"dispersion"}),
    ],
)
def test_each_test_finds_its_own_fault(broken: World, found: set[str]) -> None:
    tests = participation(broken.scores())
    assert {name for name, checked in tests.items() if checked and checked.p_value < 1e-4} == found


@pytest.mark.long
def test_p_values_are_uniform() -> None:
    """Also for lots so rare that numbers of draws are far from Gaussian."""
    for rate in (0.01, 0.3):
        values: dict[str, list[float]] = {"rate": [], "dispersion": []}
        for seed in range(200):
            for name, checked in participation(World(releases=30, canaries=300, rate=rate).scores(seed)).items():
                values[name].append(checked.p_value)
        for name, found in values.items():
            assert np.mean(np.array(found) < 0.05) <= stats.binom.isf(1e-3, 200, 0.05) / 200, (name, rate)
            assert stats.kstest(found, "uniform").pvalue > 1e-4 or name == "rate", (name, rate)


def test_where_there_is_nothing_to_test_nothing_is_tested() -> None:
    alone = ScoreSums(np.array([True, False]))
    alone.add(np.zeros(2), np.zeros(2, bool), 1.0, 0.5)
    assert release_game(alone.scores().game, 0.05) is None
    tests = participation(alone.scores())
    assert tests["dispersion"] is None and tests["rate"] is not None
    nobody = ScoreSums(np.zeros(50, bool))
    nobody.add(np.ones(50), np.zeros(50, bool), 1.0, 0.5)
    assert release_game(nobody.scores().game, 0.05) is None
    assert participation(nobody.scores())["rate"] is None
    everybody = World(rate=1.0, releases=20).scores()
    assert participation(everybody)["dispersion"] is None
    rate = participation(everybody)["rate"]
    assert rate is not None and rate.p_value == rate.value == 1
    everyone = World(rate=1.0, releases=20, noise=0.0).scores()
    game = release_game(everyone.game, 0.05)
    assert game is not None and game.mu > 1e5
