"""Tests of the noise over a whole run: exact where it is right, and each finds its own fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dpbench.capabilities.auditing.audit import TESTS as TOGETHER
from dpbench.capabilities.auditing.fresh import NAMES, fresh_noise
from dpbench.capabilities.canaries.residuals import MOST_RELEASES, directions
from dpbench.capabilities.canaries.scores import Scores, ScoreSums
from tests.capabilities.auditing.worlds import World

Noise = NDArray[np.float64]
WORLD = World(z=1.3, rate=0.1, releases=140, canaries=300)


def scores(noise: Noise, z: float | Noise = WORLD.z, seed: int = 0) -> Scores:
    """What an auditor adds up where the noise is a matrix of standard deviations, shape (releases, canaries)."""
    rng = np.random.default_rng([seed, 1])
    member = rng.random(noise.shape[1]) < 0.5
    sums = ScoreSums(member)
    for row, multiplier in zip(noise, np.broadcast_to(z, len(noise)), strict=True):
        drawn = (rng.random(len(member)) < WORLD.rate) & member
        sums.add(drawn + multiplier * row, drawn, float(multiplier), WORLD.rate)
    return sums.scores()


def fresh(seed: int = 0, releases: int = WORLD.releases, canaries: int = WORLD.canaries) -> Noise:
    return np.random.default_rng(seed).standard_normal((releases, canaries))


def failed(seen: Scores, level: float = 1e-4) -> set[str]:
    return {name for name, test in fresh_noise(seen).items() if test is not None and test.p_value < level}


def opposite_after_five() -> Noise:
    """Each block of five releases is followed by its opposite."""
    rows = fresh(1, 70).reshape(-1, 5, 300)
    return np.concatenate([rows, -rows], axis=1).reshape(140, 300)


def keyed_by_ten_bits() -> Noise:
    keys = np.random.default_rng(2).integers(2**10, size=140)
    return np.stack([np.random.default_rng([3, key]).standard_normal(300) for key in keys])


def moving_average() -> Noise:
    """Of the right variance, in each release and in the sum of all."""
    rows = fresh(4, 144)
    return np.asarray((2 * rows[:140] + 2 * rows[2:142] - rows[4:]) / 3)


def cut_at_three() -> Noise:
    """Tails that end, with the right variance."""
    normal = stats.truncnorm(-3, 3)
    return np.asarray(normal.rvs((140, 300), random_state=8)) / normal.std()


def changed(at: Any, by: float, source: Any = None) -> Noise:
    """One coordinate, or one release, has other noise: its own, or that of another one, times a factor."""
    rows = fresh(11)
    rows[at] = by * rows[at if source is None else source]
    return rows


BROKEN: dict[str, tuple[Callable[[], Noise], set[str]]] = {
    "z(t+5) = -z(t)": (opposite_after_five, {"accumulated noise", "spectrum of the noise", "closest releases"}),
    "10 bits": (keyed_by_ten_bits, {"closest releases"}),
    "moving average with a sum of one": (moving_average, {"spectrum of the noise"}),
    "tails cut at 3": (cut_at_three, {"kurtosis of the noise"}),
    "opposite coordinates": (lambda: changed(np.s_[:, 17], -1, np.s_[:, 200]), {"closest canaries"}),
    "a loud coordinate": (lambda: changed(np.s_[:, 17], 1.5), {"canary by canary"}),
    "a release with half of the noise": (lambda: changed(40, 0.5), {"release by release"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_fault_is_found_by_the_test_that_is_due(name: str) -> None:
    broken, due = BROKEN[name]
    assert due <= failed(scores(broken()))


def test_noise_that_adapts_is_standardized_release_by_release() -> None:
    multipliers = np.geomspace(0.3, 3.0, 140)
    assert failed(scores(fresh(), multipliers), level=0.01) == set()
    constant = fresh() / multipliers[:, None] * np.sqrt(np.mean(multipliers**2))  # declared to adapt, and does not
    assert "kurtosis of the noise" in failed(scores(constant, multipliers))


@pytest.mark.parametrize(("releases", "canaries", "runs"), [(12, 20, 300), (30, 100, 50)])
def test_p_values_are_uniform_or_conservative(releases: int, canaries: int, runs: int) -> None:
    """In runs of few releases and canaries too, at the level that an audit uses."""
    tests = [fresh_noise(scores(fresh(seed, releases, canaries), seed=seed)) for seed in range(runs)]
    for name in NAMES:
        found = np.array([test[name].p_value for test in tests])  # type: ignore[union-attr]
        for level in (0.05 / TOGETHER, 0.05):
            assert (found < level).sum() <= stats.binom.isf(1e-3, runs, level), (name, level)
        if name in ("accumulated noise", "kurtosis of the noise"):  # others: by pairs, or in as many directions
            assert stats.kstest(found, "uniform").pvalue > 1e-4, name


def test_directions_are_orthonormal() -> None:
    for canaries in (3, 20, 2000):
        basis = directions(canaries)
        np.testing.assert_allclose(basis @ basis.T, np.diag(np.arange(16) < canaries), atol=1e-12)


def test_where_there_is_nothing_to_test_nothing_is_tested() -> None:
    def untested(noise: Noise) -> set[str]:
        return {name for name, test in fresh_noise(scores(noise)).items() if test is None}

    assert untested(fresh(0, 1, 20)) == set(NAMES) - {"canary by canary"}
    assert untested(np.zeros((10, 20))) == set(NAMES)  # no noise: its scale is found
    assert untested(fresh(0, 3, 30)) == {"spectrum of the noise", "closest canaries", "kurtosis of the noise"}


def test_only_so_many_releases_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_RELEASES == 4096
    monkeypatch.setattr("dpbench.capabilities.canaries.residuals.MOST_RELEASES", 50)
    seen = scores(fresh())
    assert seen.residuals is not None and len(seen.residuals.over_canaries) == 50
    assert failed(seen, level=0.01) == set()


def test_scores_of_earlier_versions_go_on_and_their_noise_is_not_tested() -> None:
    sums = WORLD.sums()
    kept = json.loads(json.dumps(sums.state_dict()))
    earlier = ScoreSums.of({name: value for name, value in kept.items() if name not in ("residuals", "probes")})
    assert fresh_noise(earlier.scores()) == dict.fromkeys(NAMES)
    earlier.add(np.ones(300), np.zeros(300, bool), 1.0, 0.1)
    assert earlier.scores().residuals is None and earlier.seen.releases == 141
