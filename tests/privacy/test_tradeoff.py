"""Bounds of membership tests: against exact curves, and as curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.tradeoff import TradeOff, curve_accountant, reconstruction_bound, trade_off
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


@pytest.mark.parametrize(("z", "rate"), [(1.0, 0.1), (0.5, 0.01), (3.0, 0.5)])
def test_one_sampled_sum(z: float, rate: float) -> None:
    """The best test of (1 − q)·N(0, z²) + q·N(1, z²) against N(0, z²) is a threshold (Neyman & Pearson).

    The bound covers both directions of the neighboring relation, so where this test has large rates it is larger.
    """
    curve = trade_off({event(z, PoissonSampling(1000, rate)): 1})
    false_positive_rates = RATES[1:-1]
    thresholds = norm.isf(false_positive_rates)
    exact = (1 - rate) * false_positive_rates + rate * norm.sf(thresholds - 1 / z)
    bound = curve.max_true_positive_rate(false_positive_rates)
    assert (bound >= exact * (1 - 1e-9)).all()
    is_steep = (false_positive_rates >= 1e-4) & (false_positive_rates <= 0.3)
    assert (bound[is_steep] <= exact[is_steep] * 1.01).all()
    assert curve.advantage == pytest.approx(rate * (2 * norm.cdf(0.5 / z) - 1), rel=2e-3)


@pytest.mark.parametrize(
    ("z", "rate", "steps", "true_positive_rates", "advantage"),
    [
        (1.1, 256 / 60_000, 1000, (0.00169789, 0.0151608, 0.130271), 0.0605461),
        (0.8, 0.02, 300, (0.00984301, 0.0533579, 0.266646), 0.242053),
        (2.0, 0.5, 20, (0.0287989, 0.123592, 0.44306), 0.423607),
    ],
)
def test_riskcal(
    z: float,
    rate: float,
    steps: int,
    true_positive_rates: tuple[float, ...],
    advantage: float,
) -> None:
    """Figures of riskcal 1.5.1 (Kulynych et al. 2024) with dp_accounting 0.6.

    pld = privacy_loss_distribution.from_gaussian_mechanism(
        z, sampling_prob=rate, value_discretization_interval=1e-4
    ).self_compose(steps)
    1 - riskcal.analysis.get_beta_from_pld(pld, alpha=[0.001, 0.01, 0.1]), riskcal.analysis.get_advantage_from_pld(pld)

    Its true positive rates are no upper bounds: with an interval of 1e-5 they are smaller than the exact ones.
    """
    curve = trade_off({event(z, PoissonSampling(60_000, rate)): steps})
    bound = curve.max_true_positive_rate([0.001, 0.01, 0.1])
    assert (bound >= true_positive_rates).all()
    np.testing.assert_allclose(bound, true_positive_rates, rtol=0.015)
    assert curve.advantage == pytest.approx(advantage, rel=0.01)


def test_randomized_response() -> None:
    """Of (ε, 0)-DP alone: e^ε·fpr up to 1/(1 + e^ε), then the mirror image; its advantage is (e^ε − 1)/(e^ε + 1)."""
    epsilon = 1.5
    curve = TradeOff(np.array([0.0, epsilon]), np.array([math.tanh(epsilon / 2), 0.0]))
    corner = 1 / (1 + math.exp(epsilon))
    exact = np.where(corner >= RATES, math.exp(epsilon) * RATES, 1 - math.exp(-epsilon) * (1 - RATES))
    np.testing.assert_allclose(curve.max_true_positive_rate(RATES), exact, atol=1e-12)
    assert curve.advantage == pytest.approx(math.tanh(epsilon / 2))


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
    curve = TradeOff(epsilon, delta)
    rates = np.linspace(0, 1, 101)[:, None]
    steep = np.exp(epsilon) * rates + delta
    flat = 1 - np.exp(-epsilon) * (1 - rates - delta)
    least = np.minimum(np.minimum(steep, flat).min(axis=1), 1.0)
    np.testing.assert_allclose(curve.max_true_positive_rate(rates[:, 0]), least, atol=1e-9)


@pytest.mark.parametrize("sampling", [FixedSizeSampling(1000, 1000), FullParticipation(1000)])
def test_rates_bound_the_best_attack_on_a_sum(sampling: Sampling) -> None:
    """The attack that knows all other records: a threshold on the noised sum, played 100,000 times."""
    z = 0.7
    rng = np.random.default_rng(0)
    others, members = z * rng.standard_normal((2, 100_000))
    members += 1  # the sensitivity
    bound = trade_off({event(z, sampling): 1}).max_true_positive_rate([0.01])
    threshold = np.quantile(others, 0.99)
    reached = (members > threshold).mean()
    assert reached <= bound[0] + 0.005
    assert reached >= 0.5 * bound[0]


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


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(("z", "candidates"), [(2.0, 4097), (0.5, 17), (1.0, 2)])
def test_reconstruction_after_gaussian_noise(z: float, candidates: int, copies: int) -> None:
    """With μ-GDP Φ(Φ⁻¹(1/N) + μ) at most (Kaissis et al. 2023), with copies for their number times μ."""
    bound = reconstruction_bound(trade_off({full(z): 1}), candidates, copies)
    ranks = np.arange(1, candidates)
    exact = norm.cdf(norm.ppf(ranks / candidates) + copies / z)
    assert exact[0] <= bound.probability <= exact[0] * 1.02
    exposure = float(exact @ np.log2((ranks + 1) / ranks))
    assert exposure <= bound.exposure <= exposure * 1.02
    assert bound.exposure < math.log2(candidates)


@pytest.mark.parametrize("z", [0.2, 0.4, 1.0])
def test_the_best_attacker_of_orthogonal_candidates_stays_below_the_bound(z: float) -> None:
    """A release is the record's unit vector plus noise; the likeliest candidate is the largest coordinate."""
    candidates = 257
    bound = reconstruction_bound(trade_off({full(z): 1}), candidates)
    values = np.linspace(-9, 9, 20001) + 1 / z  # of the record's coordinate in units of the noise
    weights = norm.pdf(values - 1 / z) * (values[1] - values[0])
    success = float(weights @ norm.cdf(values) ** (candidates - 1))
    # The rank is 1 plus the number of other coordinates above: binomial given the value.
    above = np.arange(candidates)
    ranks = binom.pmf(above, candidates - 1, norm.sf(values)[:, None])
    exposure = float(weights @ ranks @ (math.log2(candidates) - np.log2(above + 1)))
    assert success <= bound.probability <= 1.6 * success
    assert exposure <= bound.exposure <= 1.3 * exposure


@pytest.mark.parametrize(("candidates", "copies"), [(1, 1), (10, 0)])
def test_no_choice_is_no_reconstruction(candidates: int, copies: int) -> None:
    with pytest.raises(ConfigurationError, match="two candidates or more"):
        reconstruction_bound(trade_off({full(1.0): 1}), candidates, copies)
