"""Trials are drawn once, stay secret, go on after a kill, and are gone in the end; their scores have noise."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpbench.capabilities.tune.space import read_space
from dpbench.capabilities.tune.stated import BestOfTrials
from dpbench.capabilities.tune.trials import (
    HIDDEN,
    Trial,
    Winner,
    best_trial,
    chance_of_at_most,
    draw_trials,
    forget,
    tuning_alone,
)
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.locks import open_locked
from dpbench.privacy.accounting.composition import Selection
from tests.capabilities.tune.test_stated import DELTA, SHAPES, THREE, best_of

SPACE = read_space(["optimizer.lr=tag(log,interval(0.01,1))", "model.width=1,2", "data=digits"])
RECORDS = 200.0


@pytest.mark.parametrize("shape", SHAPES)
def test_the_number_of_trials_has_the_stated_distribution(shape: float) -> None:
    selection = Selection(shape, 3.0)
    rng = np.random.default_rng(0)
    numbers = [len(draw_trials(SPACE, selection, rng)) for _ in range(2000)]
    assert np.mean(numbers) == pytest.approx(3.0, abs=4 * np.std(numbers) / math.sqrt(len(numbers)))
    assert (min(numbers) == 0) == math.isinf(shape)
    for most in (1, 3, 6):
        expected = chance_of_at_most(selection, most)
        assert np.mean([number <= most for number in numbers]) == pytest.approx(expected, abs=0.05)
    if shape == 0.5:  # Papernot & Steinke 2022, definition 1
        gamma = selection.gamma
        of_two = (1 - gamma) ** 2 / (gamma**-shape - 1) * shape * (1 + shape) / 2
        assert chance_of_at_most(selection, 2) - chance_of_at_most(selection, 1) == pytest.approx(of_two)


def test_settings_are_drawn_independently() -> None:
    trials = draw_trials(SPACE, Selection(math.inf, 4000.0), np.random.default_rng(0))
    rates = [math.log(float(trial.words[0].partition("=")[2])) for trial in trials]
    widths = [trial.words[1] for trial in trials]
    assert stats.kstest(rates, stats.uniform(math.log(0.01), math.log(100)).cdf).pvalue > 1e-3
    assert (
        set(widths) == {"model.width=1", "model.width=2"} and abs(np.mean([w[-1] == "1" for w in widths]) - 0.5) < 0.05
    )
    assert len({trial.key for trial in trials}) == len(trials) and trials[0].key > 2**64


def test_nothing_is_drawn_by_a_seed() -> None:
    first, second = (draw_trials(SPACE, Selection(math.inf, 50.0)) for _ in range(2))
    assert [trial.words for trial in first] != [trial.words for trial in second]


class Tuning:
    """A tuning whose trials are numbers.

    Args:
        folder: Its folder.
        totals: Sum of scores of each trial; None: it fails.
        best: Statement.
    """

    def __init__(self, folder: Path, totals: list[float | None], best: BestOfTrials | None = None) -> None:
        self.folder = folder
        self.best = best or best_of(*THREE)
        self.trials = [Trial((f"optimizer.lr={number}",), 2**100 + number) for number in range(len(totals))]
        self.totals = dict(zip(self.trials, totals, strict=True))
        self.run: list[Trial] = []
        self.dies_at: int | None = None

    def _run(self, trial: Trial, best: BestOfTrials, place: Path) -> float | None:
        if self.dies_at == len(self.run):
            self.dies_at = None
            raise KeyboardInterrupt
        self.run.append(trial)
        return self.totals[trial]

    def best_trial(self, **request: Any) -> Winner | None:
        return best_trial(self.folder, request, lambda: (self.best, self.trials), self._run, RECORDS, DELTA)


def test_a_killed_tuning_goes_on_to_the_same_winner(tmp_path: Path) -> None:
    totals = [10.0, 70.0, None, 30.0]
    tuning = Tuning(tmp_path, totals, best_of(*THREE, noise=2.0))
    whole = Tuning(tmp_path / "whole", totals, best_of(*THREE, noise=2.0)).best_trial()
    for dies_at in (0, 2):
        tuning.dies_at = dies_at
        with pytest.raises(KeyboardInterrupt):
            tuning.best_trial()
        assert (tmp_path / "ledger.jsonl").exists()  # before the first trial
    winner = tuning.best_trial()
    assert winner is not None and whole is not None
    assert winner[0::2] == whole[0::2] and winner.trial.words == ("optimizer.lr=1",)
    assert tuning.run == tuning.trials  # each once


def test_what_is_hidden_is_for_its_owner_and_goes(tmp_path: Path) -> None:
    tuning = Tuning(tmp_path, [1.0, 2.0])
    tuning.best_trial()
    hidden = tmp_path / HIDDEN
    assert (
        stat.S_IMODE(os.stat(hidden).st_mode) == 0o700 and stat.S_IMODE(os.stat(hidden / "state.json").st_mode) == 0o600
    )
    forget(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ledger.jsonl"]
    with pytest.raises(ConfigurationError, match="never drawn again"):
        tuning.best_trial()


def test_another_request_is_refused(tmp_path: Path) -> None:
    tuning = Tuning(tmp_path, [1.0])
    tuning.best_trial(words=["optimizer.lr=1,2"])
    with pytest.raises(ConfigurationError, match="fixed before its first trial"):
        tuning.best_trial(words=["optimizer.lr=1,2,3"])
    assert len(tuning.run) == 1


def test_a_folder_that_is_taken(tmp_path: Path) -> None:
    taken = tuning_alone(tmp_path)
    with open_locked(tmp_path / ".lock"), pytest.raises(ConfigurationError, match="another process is tuning"):
        taken.__enter__()
    (tmp_path / "ledger.jsonl").write_text("something else\n")
    with pytest.raises(LedgerError, match="is not a dpbench ledger"):
        Tuning(tmp_path, [1.0]).best_trial()
    tuning = Tuning(tmp_path / "other", [1.0])
    tuning.best_trial()
    with open(tmp_path / "other/ledger.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigurationError, match="is not that of a tuning"):
        tuning.best_trial()
    torn = Tuning(tmp_path / "torn", [1.0])
    torn.best_trial()
    (tmp_path / "torn" / HIDDEN / "state.json").write_text('{"request":')
    with pytest.raises(ConfigurationError, match=r"state.json is damaged: choose another --out"):
        torn.best_trial()


@pytest.mark.parametrize("totals", [[], [None, None]], ids=["none", "failed"])
def test_without_a_trial_nothing_comes_out(tmp_path: Path, totals: list[float | None]) -> None:
    assert Tuning(tmp_path, totals).best_trial() is None


def test_the_score_has_the_stated_noise(tmp_path: Path) -> None:
    """The right scale is accepted, and two thirds and one and a half of it are not."""
    scores = []
    for number in range(400):
        tuning = Tuning(tmp_path / str(number), [50.0], best_of(*THREE, noise=2.0))
        tuning.trials[0] = tuning.trials[0]._replace(key=2**90 + number)
        tuning.totals = {tuning.trials[0]: 50.0}
        winner = tuning.best_trial()
        assert winner is not None
        scores.append((winner.score * RECORDS - 50.0) / 2.0)

    def accepted(scale: float) -> bool:
        return bool(stats.kstest(np.array(scores) / scale, "norm").pvalue > 1e-3)

    assert accepted(1.0) and not accepted(2 / 3) and not accepted(1.5)
    assert Tuning(tmp_path / "public", [50.0]).best_trial()[2] == 0.25  # type: ignore[index]
