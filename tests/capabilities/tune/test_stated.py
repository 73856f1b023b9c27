"""The cost of the best of a random number of trials, and its line in a ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy import special

from dpbench.capabilities.tune.stated import BestOfTrials, Releases, Setting
from dpbench.capabilities.tune.trials import _write_ledger
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.accountants import DEFAULT_ORDERS
from dpbench.privacy.accounting.composition import Selection, epsilon, ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.tails import uncovered_mass
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, find_scheme

Array = NDArray[np.float64]
N = 1000
DELTA = 1e-5
ORDERS = np.array(DEFAULT_ORDERS)
SHAPES = [math.inf, 1.0, 0.5, 0.0]


def setting(rate: float, z: float, steps: int) -> Setting:
    return Setting((f"data.expected_batch_size={rate * N:g}",), (Releases(PoissonSampling(N, rate), z, steps),))


THREE = (setting(0.05, 1.2, 100), setting(0.2, 3.0, 200), setting(0.01, 0.6, 50))


def best_of(*settings: Setting, shape: float = math.inf, mean: float = 5.0, noise: float | None = None) -> BestOfTrials:
    return BestOfTrials(N, mean, None if math.isinf(shape) else shape, settings, "accuracy", noise)


def cost(best: BestOfTrials, accountant: str = "rdp") -> float:
    return epsilon({Event(best, (SumQuery("best", 1.0, 1.0),)): 1}, DELTA, accountant)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_setting_costs_what_dp_accounting_says(shape: float) -> None:
    for one in THREE:
        ((sampling, z, steps),) = one.releases
        accountant = RdpAccountant(DEFAULT_ORDERS)
        trial = SelfComposedDpEvent(PoissonSampledDpEvent(sampling.rate, GaussianDpEvent(z)), steps)
        accountant.compose(RepeatAndSelectDpEvent(ComposedDpEvent([trial]), 5.0, shape))
        assert cost(best_of(one, shape=shape)) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def test_several_settings_cost_the_largest_divergence_at_each_order() -> None:
    """Poisson: ε(α) + m·δ(log(1 + 1/(α−1))) + log(m)/(α−1), by hand."""
    curves = []
    for one in THREE:
        ((sampling, z, steps),) = one.releases
        accountant = RdpAccountant(DEFAULT_ORDERS)
        accountant.compose(PoissonSampledDpEvent(sampling.rate, GaussianDpEvent(z)), steps)
        curves.append(accountant.rdp)
    noise = 1.5
    curves.append(np.array(DEFAULT_ORDERS) / (2 * noise**2))
    worst = np.max(curves, axis=0)
    assert len({int(np.argmax([curve[at] for curve in curves])) for at in range(len(worst))}) > 1
    orders = np.array(DEFAULT_ORDERS)
    epsilons = []
    for alpha, divergence in zip(orders, worst, strict=True):
        hat = math.log1p(1 / (alpha - 1))
        by_order = (orders - 1) * (worst - hat + np.log1p(-1 / orders)) - np.log(orders)
        delta = math.exp(min(0.0, float(np.minimum(by_order, np.log1p(-np.exp(-worst)) / 2).min())))
        rdp = divergence + 5.0 * delta + math.log(5.0) / (alpha - 1)
        epsilons.append(rdp + math.log1p(-1 / alpha) - math.log(DELTA * alpha) / (alpha - 1))
    assert cost(best_of(*THREE, noise=noise)) == pytest.approx(min(epsilons), rel=1e-6)


def divergences(p: Array, q: Array) -> Array:
    """Rényi divergences at all orders."""
    with np.errstate(divide="ignore"):
        logs = np.log(p), np.log(q)
    is_possible = p > 0
    terms = [order * logs[0][is_possible] + (1 - order) * logs[1][is_possible] for order in ORDERS]
    return special.logsumexp(terms, axis=1) / (ORDERS - 1)


def deltas(p: Array, q: Array, epsilons: Array) -> Array:
    return np.array([np.maximum(0, p - np.exp(epsilon) * q).sum() for epsilon in epsilons])


def of_trials(generating: Callable[[Array], Array], trial: Array) -> Array:
    """Distribution of the largest of K outputs, by the generating function of K; without one, the first entry."""
    below = np.concatenate([[0.0], np.cumsum(trial)])
    best = np.diff(generating(below))
    return np.concatenate([generating(np.zeros(1)), best])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 6.0])
def test_exact_divergences_lie_below_the_bounds(shape: float, mean: float) -> None:
    """Of a finite mechanism, for which the best of K has a distribution in closed form."""
    selection = Selection(shape, mean)

    def generating(x: Array) -> Array:
        if math.isinf(shape):
            return np.exp(mean * (x - 1))
        gamma = selection.gamma
        if shape == 0:
            return np.log(1 - (1 - gamma) * x) / np.log(gamma)
        return ((1 - (1 - gamma) * x) ** -shape - 1) / (gamma**-shape - 1)

    grid = np.linspace(-4, 4, 801)
    for shift in (0.3, -0.3, 1.0, -1.0):
        trial, other = (np.exp(-((grid - mu) ** 2) / 2) for mu in (0.0, shift))
        trial, other = trial / trial.sum(), other / other.sum()
        best, other_best = of_trials(generating, trial), of_trials(generating, other)
        bound = selection.curve(ORDERS, np.maximum(divergences(trial, other), divergences(other, trial)))
        assert (divergences(best, other_best) <= bound + 1e-9).all()

        def delta_of(epsilons: Array, pair: tuple[Array, Array] = (trial, other)) -> Array:
            return np.maximum(deltas(*pair, epsilons), deltas(*pair[::-1], epsilons))

        surcharge = selection.surcharge(delta_of)
        hats = np.array([0.0, 0.5, 1.0, 2.0])
        assert (deltas(best, other_best, hats + surcharge) <= mean * delta_of(hats) + 1e-12).all()
        if mean > 2:  # choosing does cost: the claim of one trial is false of the best
            either = np.maximum(deltas(best, other_best, hats), deltas(other_best, best, hats))
            assert (either > 1.2 * delta_of(hats)).any()


def test_the_profile_is_tighter_and_covers_the_score() -> None:
    best = best_of(*THREE, noise=3.0)
    assert cost(best_of(THREE[0]), "rdp") * 0.6 < cost(best_of(THREE[0]), "pld") < cost(best_of(THREE[0]), "rdp")
    assert cost(best, "pld") < cost(replace(best, score_noise_multiplier=0.3), "pld")
    profile = best.privacy_profile
    assert profile.delta(profile.epsilon(DELTA)) == pytest.approx(DELTA, rel=1e-3)
    assert profile.delta(0.01) > 0.01


def test_a_ledger_states_it(tmp_path: Path) -> None:
    best = best_of(*THREE, shape=1.0, noise=2.0)
    _write_ledger(tmp_path / "ledger.jsonl", best, DELTA)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger.wrong is None and ledger.releases[0][1].sampling == best.with_curve()
    assert ledger_epsilon(ledger, DELTA) == pytest.approx(cost(best), rel=1e-9)
    text = (tmp_path / "ledger.jsonl").read_text()
    lines = text.splitlines()
    line = json.loads(lines[1])
    line["sampling"]["settings"][1]["releases"][0][1] *= 2  # more noise than the stated divergences
    (tmp_path / "ledger.jsonl").write_text(f"{lines[0]}\n{json.dumps(line)}\n")
    assert "are not those of its releases" in str(read_ledger(tmp_path / "ledger.jsonl").damage)
    line["sampling"]["curve"] = []
    (tmp_path / "ledger.jsonl").write_text(f"{lines[0]}\n{json.dumps(line)}\n")
    assert "divergences of a trial are missing" in str(read_ledger(tmp_path / "ledger.jsonl").damage)


def test_it_composes_with_other_releases_by_rdp_alone() -> None:
    best = Event(best_of(*THREE), (SumQuery("best", 1.0, 1.0),))
    other = Event(PoissonSampling(N, 0.05), (SumQuery("all", 1.0, 1.0),))
    alone, both = (epsilon(events, DELTA) for events in ({best: 1}, {best: 1, other: 100}))
    assert both > alone + 0.1
    with pytest.raises(ConfigurationError, match="pld does not compose best_of_trials"):
        epsilon({best: 1, other: 100}, DELTA, "pld")


def test_the_end_of_the_noise_counts_for_each_trial() -> None:
    best = best_of(setting(0.5, 0.3, 100), mean=7.0)
    one = uncovered_mass(best.trials[0], 8.65)
    assert uncovered_mass({Event(best, (SumQuery("best", 1.0, 1.0),)): 1}, 8.65) == pytest.approx(7 * one, rel=1e-6)


def test_no_batches_are_drawn_by_it() -> None:
    with pytest.raises(ConfigurationError, match="unknown sampling 'best_of_trials'"):
        find_scheme("best_of_trials")
    fixed = Setting((), (Releases(FixedSizeSampling(N, 50), 1.0, 10),))
    with pytest.raises(LedgerError, match="for other neighbors"):
        best_of(fixed)
