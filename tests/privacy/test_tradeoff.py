"""Bounds of membership tests: against exact curves, and as curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.tradeoff import TradeOff, curve_accountant, trade_off
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    ShuffledEpochs,
    TruncatedPoissonSampling,
)

RATES = np.array([0.0, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0])


def event(z: float, sampling: Sampling) -> Event:
    return Event(sampling, (SumQuery("all", 1.0, z),))


def full(z: float) -> Event:
    return event(z, FullParticipation(1000))


@pytest.mark.parametrize(("z", "steps"), [(100.0, 1), (4.0, 1), (4.0, 16), (1.0, 4), (0.2, 1)])
def test_gaussian_without_sampling(z: float, steps: int) -> None:
    """Exactly μ-GDP with μ = √T/z (Dong, Roth & Su 2022): the bound is above it, by less than 1 %."""
    mu = math.sqrt(steps) / z
    curve = trade_off({full(z): steps})
    exact = norm.cdf(norm.ppf(RATES) + mu)
    bound = curve.max_true_positive_rate(RATES)
    rounding = 1e-10
    assert (bound >= exact - rounding).all()
    assert (bound[2:] <= exact[2:] * 1.01 + rounding).all()
    assert curve.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("sampling", "z", "steps"),
    [
        (PoissonSampling(60_000, 256 / 60_000), 1.1, 1000),
        (PoissonSampling(1000, 0.3), 0.6, 1),
        (FullParticipation(1000), 0.5, 3),
        (TruncatedPoissonSampling(1000, 0.05, 60), 1.0, 100),
    ],
)
def test_is_a_trade_off_curve(sampling: Sampling, z: float, steps: int, accountant: str) -> None:
    """Increasing, concave, at least the diagonal and symmetric; its largest gap to the diagonal is the advantage."""
    curve = trade_off({event(z, sampling): steps}, accountant)
    rates = np.linspace(0, 1, 2001)
    bound = curve.max_true_positive_rate(rates)
    assert (np.diff(bound) >= 0).all()
    assert (np.diff(bound, 2) <= 1e-12).all()
    assert (bound >= rates).all()
    assert bound[-1] == 1
    np.testing.assert_allclose(curve.max_true_positive_rate(1 - bound), 1 - rates, atol=1e-3)
    assert (bound - rates).max() == pytest.approx(curve.advantage, abs=1e-3)
    by_pld = trade_off({event(z, sampling): steps}, "pld").max_true_positive_rate(rates)
    if not isinstance(sampling, TruncatedPoissonSampling):  # of which pld takes neighbors for further apart
        assert (bound >= by_pld - 1e-9).all()


@settings(max_examples=25, deadline=None)
@given(
    slopes=st.lists(st.floats(0, 5), min_size=1, max_size=20, unique=True),
    deltas=st.lists(st.floats(0, 1), min_size=20, max_size=20),
)
def test_polygon_is_the_least_of_all_tangents(slopes: list[float], deltas: list[float]) -> None:
    """Also where deltas are bounds that no mechanism has: each (ε, δ) bounds the curve, and nothing else does."""
    epsilon = np.array([0.0, *sorted(slopes)])
    epsilon = epsilon[np.concatenate([[True], np.diff(epsilon) > 1e-3])]
    delta = np.array([*deltas, 0.5])[: len(epsilon)]
    curve = TradeOff.from_profile(epsilon, delta)
    rates = np.linspace(0, 1, 101)[:, None]
    steep = np.exp(epsilon) * rates + delta
    flat = 1 - np.exp(-epsilon) * (1 - rates - delta)
    least = np.minimum(np.minimum(steep, flat).min(axis=1), 1.0)
    np.testing.assert_allclose(curve.max_true_positive_rate(rates[:, 0]), least, atol=1e-9)


def test_which_accountant() -> None:
    assert curve_accountant({full(1.0): 3}) == "pld"
    assert curve_accountant({event(1.0, FixedSizeSampling(1000, 50)): 3}) == "rdp"
    assert curve_accountant({full(0.01): 3}) == "rdp"  # pld would take hours
    assert trade_off({full(0.01): 3}).advantage == pytest.approx(1)
    assert trade_off({full(1.0): 0}).advantage == 0  # nothing was released
    with pytest.raises(ConfigurationError, match="'shuffled_epochs'"):
        trade_off({event(1.0, ShuffledEpochs(1000, 50)): 3})


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_rates_are_rates(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        trade_off({full(1.0): 1}).max_true_positive_rate([0.5, rate])
