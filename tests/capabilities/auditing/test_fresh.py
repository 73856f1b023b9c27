"""Tests of the noise over a whole run: exact where it is right, and each finds its own fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpbench.capabilities.auditing.audit import TESTS as TOGETHER
from dpbench.capabilities.auditing.audit import Verdict, audit
from dpbench.capabilities.auditing.family import Family
from dpbench.capabilities.auditing.fresh import NAMES, fresh_noise
from dpbench.capabilities.canaries.residuals import MOST_RELEASES, directions
from dpbench.capabilities.canaries.scores import Scores, ScoreSums
from tests.capabilities.auditing.worlds import World, ledger_of

Noise = NDArray[np.float64]
CANARIES, RELEASES, Z, RATE = 300, 140, 1.3, 0.1
TESTS = set(NAMES)


def scores(noise: Noise, z: float | NDArray[np.float64] = Z, replace_one: bool = False, seed: int = 0) -> Scores:
    """What an auditor adds up where the noise is a matrix of standard deviations, shape (releases, canaries)."""
    rng = np.random.default_rng([seed, 1])
    releases, canaries = noise.shape
    member, multipliers = rng.random(canaries) < 0.5, np.broadcast_to(z, releases)
    sums = ScoreSums(member, replace_one)
    for row, multiplier in zip(noise, multipliers, strict=True):
        drawn = (rng.random(canaries) < RATE) & (member | replace_one)
        move = np.where(member, 0.5, -0.5) if replace_one else np.ones(canaries)
        sums.add(np.where(drawn, move, 0.0) + multiplier * row, drawn, float(multiplier), RATE)
    return sums.scores()


def fresh(seed: int = 0, releases: int = RELEASES, canaries: int = CANARIES) -> Noise:
    return np.random.default_rng(seed).standard_normal((releases, canaries))


def failed(seen: Scores, level: float = 1e-4) -> set[str]:
    return {name for name, test in (fresh_noise(seen)).items() if test is not None and test.p_value < level}


def opposite(lag: int) -> Noise:
    """Each block of `lag` releases is followed by its opposite."""
    rows = fresh(1, RELEASES // 2).reshape(-1, lag, CANARIES)
    return np.concatenate([rows, -rows], axis=1).reshape(RELEASES, CANARIES)


def keyed_by(bits: int) -> Noise:
    """The noise of a release has one of 2**bits keys."""
    keys = np.random.default_rng(2).integers(2**bits, size=RELEASES)
    return np.stack([np.random.default_rng([3, key]).standard_normal(CANARIES) for key in keys])


def filtered(*coefficients: float) -> Noise:
    """A moving average of standard normal noise, of the right variance."""
    rows = fresh(4, RELEASES + len(coefficients))
    moving = sum(c * rows[lag : lag + RELEASES] for lag, c in enumerate(coefficients))
    return np.asarray(moving / math.hypot(*coefficients))


def with_random_signs() -> Noise:
    """Every other block of seven is the one before, each release with a sign of its own."""
    rows = fresh(5)
    signs = np.random.default_rng(6).choice([-1.0, 1.0], size=RELEASES)
    for release in range(7, RELEASES):
        if release // 7 % 2:
            rows[release] = signs[release] * rows[release - 7]
    return rows


def without_mean(length: int) -> Noise:
    """The noise of each block of releases has the sum zero."""
    rows = fresh(7).reshape(-1, length, CANARIES)
    rows = (rows - rows.mean(1, keepdims=True)) * math.sqrt(length / (length - 1))
    return rows.reshape(RELEASES, CANARIES)


def cut_at(deviations: float) -> Noise:
    """Tails that end, with the right variance."""
    normal = stats.truncnorm(-deviations, deviations)
    return np.asarray(normal.rvs((RELEASES, CANARIES), random_state=8)) / normal.std()


def loud_and_quiet() -> Noise:
    """The right variance on average over the releases."""
    return fresh(9) * np.where(np.arange(RELEASES) % 2, 0.7, math.sqrt(2 - 0.49))[:, None]


def in_pairs() -> Noise:
    """Two coordinates have opposite noise."""
    rows = fresh(10)
    rows[:, 17] = -rows[:, 200]
    return rows


def scaled(rows: Noise, by: float, canary: int | None = None, release: int | None = None) -> Noise:
    """One coordinate, or one release, has other noise."""
    if canary is not None:
        rows[:, canary] *= by
    if release is not None:
        rows[release] *= by
    return rows


BROKEN: dict[str, tuple[Callable[[], Noise], set[str]]] = {
    "z(t+2) = -z(t)": (lambda: opposite(2), {"accumulated noise", "spectrum of the noise", "closest releases"}),
    "z(t+5) = -z(t)": (lambda: opposite(5), {"accumulated noise", "spectrum of the noise", "closest releases"}),
    "8 bits": (lambda: keyed_by(8), {"accumulated noise", "closest releases"}),
    "10 bits": (lambda: keyed_by(10), {"closest releases"}),
    "moving average with a sum of one": (lambda: filtered(2, 0, 2, 0, -1), {"spectrum of the noise"}),
    "partly taken back": (lambda: filtered(1, 0, 0, -0.6), {"accumulated noise", "spectrum of the noise"}),
    "random signs": (with_random_signs, {"closest releases"}),
    "blocks of sum zero": (lambda: without_mean(10), {"accumulated noise", "spectrum of the noise"}),
    "tails cut at 2.5": (lambda: cut_at(2.5), {"kurtosis of the noise"}),
    "tails cut at 3": (lambda: cut_at(3.0), {"kurtosis of the noise"}),
    "loud and quiet releases": (loud_and_quiet, {"kurtosis of the noise"}),
    "opposite coordinates": (in_pairs, {"closest canaries"}),
    "a coordinate with half of the noise": (lambda: scaled(fresh(11), canary=17, by=0.5), {"canary by canary"}),
    "a loud coordinate": (lambda: scaled(fresh(11), canary=17, by=1.5), {"canary by canary"}),
    "a release with half of the noise": (lambda: scaled(fresh(12), release=40, by=0.5), {"release by release"}),
}


@pytest.mark.parametrize("replace_one", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_found_by_the_test_that_is_due(name: str, replace_one: bool) -> None:
    broken, due = BROKEN[name]
    assert due <= failed(scores(broken(), replace_one=replace_one))


def test_right_noise_passes_of_any_scale() -> None:
    """The scale has a test of its own."""
    for scale in (1.0, 2 / 3, 3 / 2):
        assert failed(scores(scale * fresh()), level=0.01) == set()


def test_noise_that_adapts_is_standardized_release_by_release() -> None:
    multipliers = np.geomspace(0.3, 3.0, RELEASES)
    assert failed(scores(fresh(), multipliers), level=0.01) == set()
    constant = fresh() / multipliers[:, None] * np.sqrt(np.mean(multipliers**2))  # declared to adapt, and does not
    assert "kurtosis of the noise" in failed(scores(constant, multipliers))


def test_p_values_are_uniform_or_conservative() -> None:
    """In runs of few releases and canaries too, at the level that an audit uses."""
    pairs_and_extremes = ("closest releases", "closest canaries", "canary by canary", "release by release")
    conservative = (
        "spectrum of the noise",
        *pairs_and_extremes,
    )  # in as many directions as canaries; by pairs
    for releases, canaries, runs in ((12, 20, 300), (30, 200, 100)):
        values: dict[str, list[float]] = {name: [] for name in TESTS}
        for seed in range(runs):
            for name, test in (fresh_noise(scores(fresh(seed, releases, canaries), seed=seed))).items():
                values[name].append(test.p_value)
        for name, found in values.items():
            for level in (0.05 / TOGETHER, 0.05):
                below = int((np.array(found) < level).sum())
                assert below <= stats.binom.isf(1e-3, runs, level), (name, releases, level, below)
            assert stats.kstest(found, "uniform").pvalue > 1e-4 or name in conservative, (name, releases)


def test_directions_are_orthonormal() -> None:
    for canaries in (3, 20, 2000):
        basis = directions(canaries)
        np.testing.assert_allclose(basis @ basis.T, np.diag(np.arange(16) < canaries), atol=1e-12)


def test_where_there_is_nothing_to_test_nothing_is_tested() -> None:
    tested = {name for name, test in (fresh_noise(scores(fresh(0, 1, 20)))).items() if test is not None}
    assert tested == {"canary by canary"}
    assert (fresh_noise(scores(np.zeros((10, 20))))) == dict.fromkeys(TESTS)  # no noise: its scale is found
    few = fresh_noise(scores(fresh(0, 3, 30)))
    none = {name for name, test in few.items() if test is None}
    assert none == {"spectrum of the noise", "closest canaries", "kurtosis of the noise"}


def test_only_so_many_releases_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_RELEASES == 4096
    monkeypatch.setattr("dpbench.capabilities.canaries.residuals.MOST_RELEASES", 50)
    seen = scores(fresh())
    assert seen.residuals is not None and len(seen.residuals.over_canaries) == 50
    assert failed(seen, level=0.01) == set()
    assert Scores.model_validate(seen.model_dump()).residuals is not None


def test_the_verdict_rests_on_them() -> None:
    """Without these tests all of them are CONSISTENT."""
    world = World(z=Z, rate=RATE, releases=RELEASES, canaries=CANARIES)
    family = Family(ledger_of(world).events, 1e-5)
    causes = {"8 bits": "accumulated noise", "tails cut at 3": "kurtosis of the noise"}
    for name, cause in causes.items():
        result = audit(ledger_of(world), scores(BROKEN[name][0]()), 0.95, family)
        assert result.verdict != Verdict.CONSISTENT and cause in result.accused_by, name
    result = audit(ledger_of(world), scores(fresh()), 0.95, family)
    assert result.verdict == Verdict.CONSISTENT
    assert all(check.passed for check in result.checks[:11])


def earlier_version(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kept.items() if name not in ("residuals", "probes")}


def test_scores_of_earlier_versions_are_read_and_their_noise_is_not_tested() -> None:
    world = World(z=Z, rate=RATE, releases=RELEASES, canaries=CANARIES)
    seen = scores(cut_at(3.0))
    old = Scores.model_validate(json.loads(json.dumps(earlier_version(seen.model_dump()))))
    assert old.residuals is None and (fresh_noise(old)) == dict.fromkeys(TESTS)
    result = audit(ledger_of(world), old)
    assert result.verdict == Verdict.CONSISTENT
    assert [check.name for check in result.checks if check.passed] == [check.name for check in result.checks[:4]]


def test_a_run_that_began_with_an_earlier_version_goes_on_without_a_test() -> None:
    member, none = np.ones(20, dtype=bool), np.zeros(20, dtype=bool)
    first = ScoreSums(member)
    first.add(np.zeros(20), none, 1.0, 0.1)
    second = ScoreSums.of(earlier_version(first.state_dict()))
    second.add(np.ones(20), none, 1.0, 0.1)
    assert second.scores().residuals is None and second.seen.releases == 2


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("over_releases", [[0.0]], "over_releases, weights and by_canary differ in length"),
        ("by_canary", [0.0], "differ in length"),
        ("fourth", "much", "residuals.fourth"),
        ("squared", float("nan"), "residuals.squared"),
        ("over_canaries", [[1.0]], "residuals.over_canaries.0"),
    ],
)
def test_damaged_residuals_are_named(key: str, value: object, words: str) -> None:
    kept = World(releases=7, canaries=30, rate=0.3).scores().model_dump()
    with pytest.raises(ValueError, match=words):
        Scores.model_validate(kept | {"residuals": kept["residuals"] | {key: value}})


def test_reach_and_replacement_leave_the_noise_alone() -> None:
    for world in (World(releases=30, reach=0.5, move=0.5), World(releases=30, replace_one=True)):
        assert failed(replace(world, canaries=300).scores(), level=0.01) == set()
