"""Canaries in correlated noise: one observation in a round, with the declared sensitivity and independent noise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import solve_triangular, toeplitz

from dpbench.capabilities.canaries.scores import Scores, ScoreSums
from dpbench.capabilities.canaries.whitening import Rounds, RoundSums
from dpbench.capabilities.correlated.banded import Banded
from tests.support.checks import accepts_scale

BANDS, LENGTH, STEPS, CANARIES = 3, 4, 43, 400
C = np.array(Banded(BANDS).coefficients)
Z, RATE = 0.7, 0.3


def world(seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float64]]:
    """Groups, draws and correlated noise of standard deviation one when whitened, shapes (m,), (T, m) and (T, m)."""
    rng = np.random.default_rng(seed)
    group = rng.integers(LENGTH, size=CANARIES)
    is_turn = (np.arange(STEPS)[:, None] - group) % LENGTH == 0
    drawn = is_turn & (rng.random((STEPS, CANARIES)) < RATE)
    column = np.zeros(STEPS)
    column[:BANDS] = C
    matrix = toeplitz(column, np.zeros(STEPS))
    noise = solve_triangular(matrix, rng.standard_normal((STEPS, CANARIES)), lower=True)
    return group, drawn, noise


def observations(rounds: Rounds, seen: NDArray[Any], drawn: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """(rounds, m) observations and who was drawn."""
    pairs = []
    for x, there in zip(seen, drawn, strict=True):
        pair = rounds.add(x, there)
        if pair is not None:
            pairs.append(pair)
        assert rounds.complete == len(pairs)
    return np.array([x for x, _ in pairs]), np.array([there for _, there in pairs])


def test_a_participation_is_seen_once_and_whole() -> None:
    group, drawn, _ = world()
    x, there = observations(Rounds.beginning(C, LENGTH, group), drawn.astype(float), drawn)
    assert len(x) == (STEPS + 1) // LENGTH - 1
    expected = np.array([drawn[group + LENGTH * number, np.arange(CANARIES)] for number in range(len(x))])
    np.testing.assert_array_equal(there, expected)
    np.testing.assert_allclose(x, expected, atol=1e-12)


def test_the_noise_of_observations_is_that_of_independent_noise() -> None:
    group, drawn, noise = world()
    x, _ = observations(Rounds.beginning(C, LENGTH, group), noise, drawn)
    assert accepts_scale(x.ravel(), 1.0)
    lag = (x[1:] * x[:-1]).sum() / np.sqrt(x[1:].size)
    assert abs(lag) < 4.5
    plain, _ = observations(Rounds.beginning([1.0], LENGTH, group), noise, drawn)
    assert plain.std() > 1.1  # in releases as they are there is more


def sums_of(steps: int, state: Any = None, first: int = 0, group_shift: int = 0) -> ScoreSums:
    group, drawn, noise = world()
    member = drawn.any(0)
    sums = ScoreSums(member)
    sums.rounds = Rounds.beginning(C, LENGTH, (group + group_shift) % LENGTH)
    if state is not None:
        sums.load_state_dict(state)
    for step in range(first, steps):
        sums.whiten_statistics(noise[step, :2])
        sums.add(drawn[step] + Z * noise[step], drawn[step], Z, RATE)
    return sums


@pytest.mark.parametrize("at", [0, 1, 6, 7, 20])
def test_sums_go_on_from_any_step_bit_identically(at: int) -> None:
    state = json.loads(json.dumps(sums_of(at).state_dict()))
    assert sums_of(STEPS, state, at).state_dict() == sums_of(STEPS).state_dict()
    assert ScoreSums.of(state).state_dict() == state


def test_scores_say_how_often_canaries_were_seen() -> None:
    scores = sums_of(STEPS).scores()
    assert scores.rounds is not None
    assert (scores.releases, scores.observations) == (STEPS, 10)
    assert sum(scores.rounds.members) == scores.member.sum()
    assert scores.game.count == 10 * CANARIES
    assert scores.residuals is not None and len(scores.residuals.over_canaries) == STEPS
    again = Scores.model_validate(json.loads(json.dumps(scores.model_dump())))
    assert again.rounds == scores.rounds and again.observations == 10
    late = sums_of(STEPS, group_shift=1).scores()
    assert late.drawn.sum() == 0 < scores.drawn.sum()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": -1}, "length"),
        ({"complete": 1.5}, "complete"),
        ({"members": 3}, "members"),
    ],
)
def test_damaged_rounds_are_refused(change: dict[str, Any], message: str) -> None:
    right = {"length": 2, "complete": 5, "members": [3, 4]}
    with pytest.raises(ValueError, match=message):
        RoundSums.model_validate({**right, **change})
