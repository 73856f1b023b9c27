"""Canaries through the whole tuner: right ones stay below their claim, and three wrong ones are found.

A trial is a step of private softmax regression on digits: the canary's gradient lies in a coordinate of its own, which
is what an attacker sees of the weights that come out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits

from dpbench.capabilities.tune.space import read_space
from dpbench.capabilities.tune.stated import BestOfTrials, Releases, Setting
from dpbench.capabilities.tune.trials import Trial, best_trial, draw_trials
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.randomness import Stream, fresh_key
from dpbench.privacy.sampling import FullParticipation

pytestmark = pytest.mark.slow
SPACE = read_space(["optimizer.lr=0.1,1"])
N = 60
DELTA = 1e-3
Z = 2.0
RUNS = 1000
LEVEL = 0.01
NOTHING = -1e9  # seen where no trial comes out


def clipped_sum() -> torch.Tensor:
    """Sum of the gradients of softmax regression at zero weights, each of norm 1 at most; the last is the canary's."""
    digits = load_digits()
    x, y = (torch.as_tensor(values[:N]) for values in (digits.data, digits.target))
    errors = 0.1 - torch.nn.functional.one_hot(y, 10).float()
    gradients = (errors[:, :, None] * x[:, None, :].float() / 16).flatten(1)
    gradients *= (1 / gradients.norm(dim=1, keepdim=True)).clamp(max=1)
    return torch.cat([gradients.sum(0), torch.zeros(1)])


SUM = clipped_sum()


def setting(z: float) -> Setting:
    return Setting((), (Releases(FullParticipation(N), z, 1),))


PUBLIC = BestOfTrials(N, 4.0, None, (setting(Z),), "accuracy", None)
HELD_OUT = BestOfTrials(N, 4.0, None, (setting(3 * Z),), "accuracy", 3 * Z)


class Attack:
    """A tuner, and what an attacker sees of its result.

    Args:
        folder: Folder of one tuning.
        best: Statement of the tuner.
        is_member: True if the canary is there.
    """

    def __init__(self, folder: Path, best: BestOfTrials, is_member: bool) -> None:
        self.folder = folder
        self.best = best
        self.is_member = is_member
        self.seen: dict[Trial, float] = {}

    def trained_on(self, trial: Trial, best: BestOfTrials, place: Path) -> float:
        """Train with the canary or without it; the score, of public records, favours the canary."""
        total = SUM.clone()
        total[-1] += float(self.is_member)
        add_gaussian_noise(total, [(len(total), Z)], (fresh_key(), Stream.NOISE))
        self.seen[trial] = float(total[-1])
        return self.seen[trial]

    def scored_on(self, trial: Trial, best: BestOfTrials, place: Path) -> float:
        """Train without the canary; the larger rate is better on the canary, which was held out."""
        self.seen[trial] = float(trial.words == ("optimizer.lr=1",))
        return float(self.is_member) * self.seen[trial] + (1 - self.seen[trial]) * 0.5

    def result(self, trials: list[Trial], run: Callable[..., float]) -> float:
        """What the attacker sees of the weights that come out."""
        winner = best_trial(self.folder, {}, lambda: (self.best, trials), run, 1.0, DELTA)
        return self.seen[winner.trial] if winner is not None else NOTHING


def drawn(attack: Attack, number: int | None = None) -> list[Trial]:
    rng = np.random.default_rng(fresh_key())
    if number is None:
        return draw_trials(SPACE, attack.best.selection, rng)
    return [Trial(SPACE.draw(rng), fresh_key()) for _ in range(number)]


def audited(best: BestOfTrials, tuner: Callable[[Attack], float]) -> float:
    """Lower bound of ε at δ from tunings with and without the canary: the best of some events.

    An event is that a result lies above a threshold, or below; its probabilities have Clopper and Pearson's limits,
    each at its share of the level.
    """
    results: dict[bool, Any] = {}
    # In memory where possible: nothing but the tuner's files takes time.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for is_member in (False, True):
            attacks = (Attack(Path(folder) / f"{is_member}-{number}", best, is_member) for number in range(RUNS))
            results[is_member] = np.array([tuner(attack) for attack in attacks])
    thresholds = np.unique(np.quantile(np.concatenate(list(results.values())), [0.02, 0.05, 0.1, 0.5, 0.9, 0.95]))
    level = LEVEL / (4 * len(thresholds))
    bound = 0.0
    for threshold, sign, likely in product(thresholds, (1, -1), (True, False)):
        often, rarely = (int((sign * results[world] > sign * threshold).sum()) for world in (likely, not likely))
        most = stats.beta.ppf(1 - level, rarely + 1, RUNS - rarely) if rarely < RUNS else 1.0
        least = stats.beta.ppf(level, often, RUNS - often + 1) if often else 0.0
        if least > DELTA:
            bound = max(bound, float(np.log((least - DELTA) / most)))
    return bound


def claim(best: BestOfTrials) -> float:
    return epsilon({Event(best, (SumQuery("best", 1.0, 1.0),)): 1}, DELTA, "pld")


def test_right_tuners_stay_below_their_claim() -> None:
    trained = audited(PUBLIC, lambda attack: attack.result(drawn(attack), attack.trained_on))
    scored = audited(HELD_OUT, lambda attack: attack.result(drawn(attack), attack.scored_on))
    assert 0 < trained < claim(PUBLIC)
    assert scored < claim(HELD_OUT)


def test_the_best_of_a_fixed_number_is_found() -> None:
    """It claims the ε of one trial."""
    one_trial = epsilon({setting(Z).releases[0].event: 1}, DELTA, "pld")
    assert audited(PUBLIC, lambda attack: attack.result(drawn(attack, 40), attack.trained_on)) > one_trial


def test_a_number_that_depends_on_the_data_is_found() -> None:
    def tuner(attack: Attack) -> float:
        return attack.result(drawn(attack, 40 if attack.is_member else 1), attack.trained_on)

    assert audited(PUBLIC, tuner) > claim(PUBLIC)


def test_a_score_without_noise_is_found() -> None:
    silent = replace(HELD_OUT, score_noise_multiplier=None)
    assert audited(silent, lambda attack: attack.result(drawn(attack), attack.scored_on)) > claim(HELD_OUT)
