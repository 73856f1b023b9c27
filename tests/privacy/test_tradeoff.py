"""Bounds of membership tests: against exact curves, and as curves."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.tradeoff import curve_accountant, membership_bound, reconstruction_bound, trade_off
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


@pytest.mark.parametrize(("z", "steps"), [(4.0, 16), (0.2, 1)])
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


def test_riskcal() -> None:
    """Figures of riskcal 1.5.1 (Kulynych et al. 2024) with dp_accounting 0.6.

    pld = privacy_loss_distribution.from_gaussian_mechanism(
        1.1, sampling_prob=256 / 60_000, value_discretization_interval=1e-4
    ).self_compose(1000)
    1 - riskcal.analysis.get_beta_from_pld(pld, alpha=[0.001, 0.01, 0.1]), riskcal.analysis.get_advantage_from_pld(pld)

    Its true positive rates are no upper bounds: with an interval of 1e-5 they are smaller than the exact ones.
    """
    curve = trade_off({event(1.1, PoissonSampling(60_000, 256 / 60_000)): 1000})
    bound = curve.max_true_positive_rate([0.001, 0.01, 0.1])
    true_positive_rates = (0.00169789, 0.0151608, 0.130271)
    assert (bound >= true_positive_rates).all()
    np.testing.assert_allclose(bound, true_positive_rates, rtol=0.015)
    assert curve.advantage == pytest.approx(0.0605461, rel=0.01)


@pytest.mark.parametrize(
    ("accountant", "sampling"),
    [
        ("pld", PoissonSampling(1000, 0.05)),
        ("rdp", TruncatedPoissonSampling(1000, 0.05, 60)),
    ],
)
def test_is_a_trade_off_curve(accountant: str, sampling: Sampling) -> None:
    """Increasing, concave, at least the diagonal and symmetric; its largest gap to the diagonal is the advantage."""
    curve = trade_off({event(1.0, sampling): 100}, accountant)
    rates = np.linspace(0, 1, 501)
    bound = curve.max_true_positive_rate(rates)
    assert (np.diff(bound) >= 0).all()
    assert (np.diff(bound, 2) <= 1e-12).all()
    assert (bound >= rates).all()
    assert bound[-1] == 1
    np.testing.assert_allclose(curve.max_true_positive_rate(1 - bound), 1 - rates, atol=1e-3)
    assert (bound - rates).max() == pytest.approx(curve.advantage, abs=1e-3)


def test_which_accountant() -> None:
    assert curve_accountant({full(1.0): 3}) == "pld"
    assert curve_accountant({event(1.0, FixedSizeSampling(1000, 50)): 3}) == "rdp"
    assert curve_accountant({full(0.01): 3}) == "rdp"  # pld would take hours
    assert trade_off({full(0.01): 3}).advantage == pytest.approx(1)
    assert trade_off({full(1.0): 0}).advantage == 0  # nothing was released
    with pytest.raises(ConfigurationError, match="'shuffled_epochs'"):
        trade_off({event(1.0, ShuffledEpochs(1000, 50)): 3})


def test_rates_are_rates() -> None:
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigurationError, match="between 0 and 1"):
            trade_off({}).max_true_positive_rate([0.5, rate])


@pytest.mark.parametrize(("z", "candidates", "copies"), [(2.0, 4097, 1), (0.5, 17, 3)])
def test_reconstruction_after_gaussian_noise(z: float, candidates: int, copies: int) -> None:
    """With μ-GDP Φ(Φ⁻¹(1/N) + μ) at most (Kaissis et al. 2023), with copies for their number times μ."""
    bound = reconstruction_bound(trade_off({full(z): 1}), candidates, copies)
    ranks = np.arange(1, candidates)
    exact = norm.cdf(norm.ppf(ranks / candidates) + copies / z)
    assert exact[0] <= bound.probability <= exact[0] * 1.02
    exposure = float(exact @ np.log2((ranks + 1) / ranks))
    assert exposure <= bound.exposure <= exposure * 1.02
    assert bound.exposure < math.log2(candidates)


def test_no_choice_is_no_reconstruction() -> None:
    for candidates, copies in ((1, 1), (10, 0)):
        with pytest.raises(ConfigurationError, match="at least 2 candidates"):
            reconstruction_bound(trade_off({}), candidates, copies)


@pytest.mark.parametrize(("copies", "rate"), [(3, 1.0), (4, 0.1)])
def test_a_group_of_records(copies: int, rate: float) -> None:
    """By quadrature: N(0, z²) against its mixture with shifts by binomial numbers (Ganesh 2024)."""
    z = 2.0
    release = event(z, PoissonSampling(1000, rate))
    curve = trade_off({release: 1}, copies=copies)
    x = np.linspace(-15, 25, 400_001)
    absent = norm.pdf(x, 0, z)
    present = sum(binom.pmf(i, copies, rate) * norm.pdf(x, i, z) for i in range(copies + 1))
    step = x[1] - x[0]
    alpha = np.cumsum(absent[::-1])[::-1] * step  # the likelihood ratio increases with x
    power = np.cumsum(present[::-1])[::-1] * step
    rates = np.array([1e-4, 0.01, 0.1, 0.5])
    exact = np.interp(rates, alpha[::-1], power[::-1])
    bound = curve.max_true_positive_rate(rates)
    assert (bound >= exact - 1e-6).all()
    composed = trade_off({release: 1}).max_true_positive_rate(rates, copies)
    if rate == 1:
        np.testing.assert_allclose(bound, exact, rtol=0.01)
        np.testing.assert_allclose(composed, exact, rtol=0.01)
    else:
        assert (bound < composed).all()


@pytest.mark.parametrize(
    ("sampling", "copies", "group"),
    [
        (PoissonSampling(1000, 0.05), 1, 1),
        (PoissonSampling(1000, 0.05), 3, 3),
        (PoissonSampling(1000, 0.05), 101, 1),  # would take long
        (PoissonSampling(1000, 0.9), 60, 1),  # likewise: of very large losses
        (PoissonSampling(1000, 1.0), 40, 40),
        (PoissonSampling(1000, 1.0), 100, 1),
        (TruncatedPoissonSampling(1000, 0.05, 60), 3, 1),
    ],
)
def test_for_how_many_records_a_bound_is(sampling: Sampling, copies: int, group: int) -> None:
    ledger: Any = SimpleNamespace(events=Counter({event(2.0, sampling): 2}))
    assert membership_bound([ledger], copies=copies).group == group


def test_a_group_that_is_in_every_batch() -> None:
    """dp_accounting does not compose a mixture of one Gaussian that is shifted far."""
    curve = trade_off({event(1.0, PoissonSampling(1000, 1.0)): 1}, copies=100)
    assert curve.max_true_positive_rate(1e-6) == pytest.approx(1)
