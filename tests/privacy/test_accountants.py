"""Each accountant against closed forms, high-precision references, simulated worlds and other libraries."""

from __future__ import annotations

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy.stats import norm

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import (
    ACCOUNTANTS,
    MIRONOV_2017,
    TENSORFLOW_PRIVACY_ORDERS,
    ContinuousRenyiAccountant,
    LossDistribution,
    release_curve,
    theorem5_curve,
)
from dpbench.privacy.accounting.composition import (
    Selection,
    composable,
    delta_of,
    epsilon,
    nominal_events,
    selection_epsilon,
)
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, ShuffledEpochs

DELTA = 1e-5
BOUNDS = [name for name, accountant in ACCOUNTANTS.items() if accountant.guarantee]


def poisson(z: float, q: float = 1.0, population: int = 60_000) -> Event:
    return Event(PoissonSampling(population, q), (SumQuery("all", 1.0, z),))


def fixed(z: float, batch_size: int, population: int) -> Event:
    return Event(FixedSizeSampling(population, batch_size), (SumQuery("all", 1.0, z),))


def gaussian_delta(eps: float, mu: float) -> float:
    """Balle & Wang 2018, theorem 8."""
    return float(norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu))


# ------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(z=st.floats(1.5, 20), steps=st.integers(1, 30))
def test_gaussian_without_sampling(z: float, steps: int) -> None:
    """δ(ε) is known exactly: gdp gives it, bounds lie above, pld closely."""
    run, mu = {poisson(z): steps}, math.sqrt(steps) / z
    exact = float(optimize.brentq(lambda e: gaussian_delta(e, mu) - DELTA, 0, 500))
    assert epsilon(run, DELTA, "gdp") == pytest.approx(exact, rel=1e-6)
    assert exact - 1e-3 <= epsilon(run, DELTA, "pld") <= exact * 1.01 + 0.01
    for name in ("rdp", "rdp-continuous", "rdp-classic"):
        assert exact <= epsilon(run, DELTA, name) <= exact * 1.5 + 0.1
    assert delta_of(run, exact, "gdp") == pytest.approx(DELTA, rel=1e-6)
    assert delta_of(run, exact, "pld") >= DELTA * 0.99


@settings(max_examples=15, deadline=None)
@given(z=st.floats(0.5, 20), steps=st.integers(1, 400))
def test_zero_concentrated_dp(z: float, steps: int) -> None:
    """ρ = T/(2z²); the best order of the papers' conversion gives ρ + 2√(ρ log(1/δ)) (Bun & Steinke 2016)."""
    rho = steps / (2 * z**2)
    closed = rho + 2 * math.sqrt(rho * math.log(1 / DELTA))
    accountant = ContinuousRenyiAccountant("", orders=(*TENSORFLOW_PRIVACY_ORDERS, 2048.0), conversion=MIRONOV_2017)
    order = 1 + math.sqrt(math.log(1 / DELTA) / rho)
    if order > TENSORFLOW_PRIVACY_ORDERS[0]:
        assert accountant.epsilon({poisson(z): steps}, DELTA) == pytest.approx(closed, rel=1e-5)
    assert epsilon({poisson(z): steps}, DELTA, "rdp-classic") >= closed * (1 - 1e-9)


# ------------------------------------------------------------------------------------------------- many digits


@pytest.mark.parametrize("order", [1.5, 2.0, 3.7, 8.0])
@pytest.mark.parametrize(("z", "q"), [(1.1, 0.004), (1.5, 0.05), (4.0, 1e-5)])
def test_sampled_gaussian_moment(order: float, z: float, q: float) -> None:
    """RDP = log E_{x~N(0,z²)}[(1 − q + q e^{(2x−1)/(2z²)})^α] / (α−1), by quadrature with 40 digits.

    At fractional orders dp_accounting sums the terms of an alternating series without their signs: an upper bound.
    """

    def integrand(x: mpmath.mpf) -> mpmath.mpf:
        return mpmath.npdf(x, 0, z) * (1 - q + q * mpmath.exp((2 * x - 1) / (2 * mpmath.mpf(z) ** 2))) ** order

    with mpmath.workdps(40):
        points = [-40 * z, -5 * z, 0, 5 * z, order + 5 * z, order + 40 * z]
        exact = float(mpmath.log(mpmath.quad(integrand, points)) / (order - 1))
    ours = float(release_curve(poisson(z, q), (order,))[0])
    slack = 0.0 if order.is_integer() else 0.15
    assert exact <= ours <= exact * (1 + 1e-6 + slack) + 3e-14


@pytest.mark.parametrize(("z", "batch_size"), [(1.0, 100), (5.0, 1000), (0.5, 13), (30.0, 9000)])
def test_theorem_5(z: float, batch_size: int) -> None:
    """The sum itself, in integers and 60 digits, at orders up to 512."""
    orders = (2.0, 3.0, 16.0, 64.0, 512.0)
    ours = theorem5_curve(fixed(z, batch_size, 10_000), orders)
    with mpmath.workdps(60):
        rate, rdp = mpmath.mpf(batch_size) / 10_000, lambda j: j / (2 * mpmath.mpf(z) ** 2)
        for order, value in zip(orders, ours, strict=True):
            alpha = int(order)
            total = 1 + rate**2 * mpmath.binomial(alpha, 2) * min(4 * (mpmath.exp(rdp(2)) - 1), 2 * mpmath.exp(rdp(2)))
            for j in range(3, alpha + 1):
                total += rate**j * mpmath.binomial(alpha, j) * 2 * mpmath.exp((j - 1) * rdp(j))
            exact = min(mpmath.log(total) / (alpha - 1), rdp(alpha))
            assert value == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize(("z", "batch_size"), [(1.0, 100), (5.0, 100), (0.7, 2000)])
def test_theorem_5_is_looser_than_todays_bound(z: float, batch_size: int) -> None:
    orders, event = (2.0, 3.0, 8.0, 64.0, 256.0, 400.0), fixed(z, batch_size, 10_000)
    ratio = theorem5_curve(event, orders) / release_curve(event, orders)
    assert (ratio >= 1 - 1e-9).all()
    assert (ratio < 5).all()
    values = [epsilon({event: 200}, delta, "rdp-analytical") for delta in (1e-5, 1e-10, 1e-15)]
    assert values == sorted(values)
    assert all(map(math.isfinite, values))


# --------------------------------------------------------------------------------------------- simulated worlds


def losses(z: float, q: float, steps: int, removed: bool, draws: int = 400_000) -> np.ndarray:
    """Privacy losses of T sampled Gaussian sums, in the world with or without a record that contributes 1."""
    rng = np.random.default_rng(1)
    total = np.zeros(draws)
    for _ in range(steps):
        present = 0.0 if removed else rng.random(draws) < q
        x = present + z * rng.standard_normal(draws)
        ratio = np.log1p(q * np.expm1((2 * x - 1) / (2 * z**2)))
        total += -ratio if removed else ratio
    return total


@pytest.mark.parametrize(("z", "q", "steps"), [(1.0, 0.3, 10), (0.8, 0.1, 30), (2.0, 1.0, 5)])
def test_two_point_worlds(z: float, q: float, steps: int) -> None:
    """Simulated δ(ε) ≤ pld ≤ rdp; pld close to the simulation, so that the inequality means something."""
    run = {poisson(z, q): steps}
    both = [losses(z, q, steps, removed) for removed in (False, True)]
    for eps in (0.5, 1.5):
        gains = [np.clip(-np.expm1(eps - loss), 0, None) for loss in both]
        true, error = max((float(gain.mean()), float(gain.std() / math.sqrt(len(gain)))) for gain in gains)
        pld = delta_of(run, eps, "pld")
        assert true - 4 * error <= pld <= true * 1.02 + 4 * error
        for name in ("rdp", "rdp-continuous", "rdp-classic"):
            assert pld <= delta_of(run, eps, name)


def test_two_point_world_of_fixed_lots() -> None:
    """One record of two possible values ±½ in lots of m among n: what it leaks lies below both bounds."""
    z, rate, steps, rng = 1.0, 0.2, 10, np.random.default_rng(0)
    total = np.zeros(400_000)
    for _ in range(steps):
        x = 0.5 * (rng.random(len(total)) < rate) + z * rng.standard_normal(len(total))
        up, down = np.expm1((x - 0.25) / (2 * z**2)), np.expm1((-x - 0.25) / (2 * z**2))
        total += np.log1p(rate * up) - np.log1p(rate * down)
    run = {fixed(z, 200, 1000): steps}
    true = float(np.clip(-np.expm1(0.5 - total), 0, None).mean())
    assert 1e-4 < true < delta_of(run, 0.5, "rdp") <= delta_of(run, 0.5, "rdp-analytical") * (1 + 1e-9)


@pytest.mark.parametrize("z", [pytest.param(0.5, marks=pytest.mark.long), 1.0, 4.0])
def test_fixed_lots_never_cost_more_than_all_records_always(z: float) -> None:
    """Whichever lots are drawn, replacing one record moves the sum by S at most: divergences are quasi-convex."""
    for batch_size in (500, 900, 999):
        assert (
            release_curve(fixed(z, batch_size, 1000), (2.0, 3.5, 16.0)) <= np.array([2, 3.5, 16]) / z**2 / 2 + 1e-9
        ).all()
        pair = delta_of({poisson(z, batch_size / 1000, 1000): 10}, 3.0, "pld")  # a pair that replacement reaches
        assert (
            pair
            <= delta_of({fixed(z, batch_size, 1000): 10}, 3.0, "rdp")
            <= delta_of({poisson(z, 1.0): 10}, 3.0, "rdp")
        )


# ---------------------------------------------------------------------------------------------- other libraries


def test_opacus_prv_agrees_with_pld() -> None:
    from opacus.accountants import PRVAccountant

    theirs = PRVAccountant()
    theirs.history = [(1.1, 256 / 60_000, 8000)]
    value = theirs.get_epsilon(DELTA, eps_error=0.005, delta_error=DELTA / 1000)
    assert epsilon({poisson(1.1, 256 / 60_000): 8000}, DELTA, "pld") == pytest.approx(value, rel=0.01)


def test_published_values() -> None:
    """gradient_compression_denoising_2020, Table 1, and pyvacy_2019, section 5.1, to the printed digits."""
    for z, steps, printed in ((0.7, 12_000, 7.58), (1.0, 8000, 2.68), (1.1, 8000, 2.27), (1.3, 8000, 1.76)):
        run = {poisson(z, 256 / 60_000): steps}
        assert round(epsilon(run, DELTA, "rdp-classic"), 2) == pytest.approx(printed, abs=0.0051)
    assert epsilon({poisson(1.1, 256 / 60_000): 14_062}, DELTA, "rdp-classic") == pytest.approx(3.009, abs=1e-3)
    counts = {fixed(5.0, 100, 10**6): 200}
    assert epsilon(counts, 10**-6.6, "rdp") == pytest.approx(0.034, rel=0.01)


# --------------------------------------------------------------------------------------------------- properties


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(z=st.floats(0.7, 3), q=st.floats(1e-3, 0.05), steps=st.integers(10, 3000))
def test_order_among_accountants(z: float, q: float, steps: int) -> None:
    run = {poisson(z, q): steps}
    assert epsilon(run, DELTA, "rdp-continuous") <= epsilon(run, DELTA, "rdp") + 1e-12
    assert epsilon(run, DELTA, "rdp") <= epsilon(run, DELTA, "rdp-classic")
    assert epsilon(run, DELTA, "pld") <= epsilon(run, DELTA, "rdp")


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_epsilon_and_delta_are_inverse(name: str) -> None:
    for run in ({poisson(1.0, 0.01): 1000}, {fixed(2.0, 10, 1000): 100}):
        if next(iter(run))[0].kind in ACCOUNTANTS[name].samplings:
            assert delta_of(run, epsilon(run, DELTA, name), name) == pytest.approx(DELTA, rel=1e-4)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_monotone(name: str) -> None:
    make = (
        (lambda z, q: poisson(z, q))
        if "poisson" in ACCOUNTANTS[name].samplings
        else (lambda z, q: fixed(z, int(1e4 * q), 10_000))
    )
    base = epsilon({make(1.0, 0.01): 100}, DELTA, name)
    assert epsilon({make(1.2, 0.01): 100}, DELTA, name) < base
    assert epsilon({make(1.0, 0.02): 100}, DELTA, name) > base
    assert epsilon({make(1.0, 0.01): 120}, DELTA, name) > base
    assert epsilon({make(1.0, 0.01): 100}, DELTA / 2, name) > base


@pytest.mark.parametrize("name", BOUNDS)
def test_no_bound_rounds_to_nothing(name: str) -> None:
    """Rates so small that moments round to one: an epsilon of zero would be a claim that nothing was released."""
    run = {poisson(1.0, 1e-9): 10**6} if "poisson" in ACCOUNTANTS[name].samplings else {fixed(1.0, 1, 10**9): 10**6}
    assert epsilon(run, 1e-12, name) > 0


@pytest.mark.parametrize(("z", "q", "steps"), [(1e5, 0.5, 10**12), (1e6, 1e-4, 10**15), (1e6, 0.5, 10**14)])
def test_moments_that_cancel(z: float, q: float, steps: int) -> None:
    """Much noise over many steps: a moment that rounds below one must not become an epsilon of zero."""
    run = {poisson(z, q): steps}
    for name in ("rdp", "rdp-continuous", "rdp-classic"):
        assert epsilon(run, DELTA, name) >= epsilon(run, DELTA, "gdp") > 0


def test_more_noise_than_numbers_can_hold() -> None:
    for name in ("rdp", "gdp", "rdp-continuous"):
        for run in ({poisson(1e50, 0.1): 10}, {fixed(1e50, 10, 1000): 10}):
            assert 0 <= epsilon(run, DELTA, name) < 1e-3
    assert epsilon({fixed(1e4, 500, 1000): 10**9}, DELTA, "gdp") == pytest.approx(
        epsilon({fixed(9.99e3, 500, 1000): 10**9}, DELTA, "gdp"), rel=0.01
    )  # on both sides of where the series begins


def test_gdp_is_labeled_for_a_reason() -> None:
    """The central limit theorem can lie below a tight bound: here by a factor of two and more."""
    run = {poisson(0.6, 0.001): 100}
    assert epsilon(run, DELTA, "gdp") < 0.5 * epsilon(run, DELTA, "pld")
    assert not ACCOUNTANTS["gdp"].guarantee
    many = {poisson(1.1, 256 / 60_000): 14_062}
    assert epsilon(many, DELTA, "gdp") == pytest.approx(epsilon(many, DELTA, "pld"), rel=0.05)


def test_extreme_noise() -> None:
    for name in BOUNDS:
        make = poisson if "poisson" in ACCOUNTANTS[name].samplings else lambda z, q: fixed(z, int(1e5 * q), 100_000)
        assert 0 <= epsilon({make(1e4, 0.01): 1}, DELTA, name) < 0.7
        assert epsilon({make(0.03, 0.01): 1}, DELTA, name) > 600
    with pytest.raises(ConfigurationError, match=r"not computed above an epsilon of 1e\+06"):
        epsilon({poisson(1e-4, 0.01): 1}, DELTA, "pld")
    assert epsilon({poisson(0.01, 0.01): 1}, DELTA, "gdp") == math.inf
    assert delta_of({poisson(0.01, 0.01): 1}, 1.0, "gdp") == 1.0


@pytest.mark.parametrize(
    ("batch_size", "z", "steps", "low", "high"),
    [(128, 0.2285, 23438, 420.1, 422.4), (512, 0.3310, 5859, 146.9, 148.7), (1024, 0.4231, 2930, 78.7, 79.9)],
)
def test_pld_of_a_large_epsilon(batch_size: int, z: float, steps: int, low: float, high: float) -> None:
    """The noise of three_tools_2018, Table 1: limits by another program, which rounds losses down, and up."""
    run = {poisson(z, batch_size / 50_000, 50_000): steps}
    assert low < epsilon(run, 6.78e-6, "pld") < high


def test_pld_near_an_exact_epsilon() -> None:
    """Of one Gaussian sum, and of a thousand at once: wide intervals of losses cost less than a thousandth."""
    for z in (0.06, 0.02, 2e-3):
        exact = dp_accounting.get_epsilon_gaussian(z, DELTA)
        assert exact <= epsilon({poisson(z, 1.0): 1}, DELTA, "pld") <= exact * (1 + 1e-3)


@pytest.mark.parametrize(("z", "steps"), [(100.0, 10_000), (30.0, 20_000)])
def test_no_delta_is_below_what_fourier_transforms_round(z: float, steps: int) -> None:
    """Where δ vanishes in rounding there is no ε, instead of one that is too small."""
    mu = math.sqrt(steps) / z
    raw = privacy_loss_distribution.from_gaussian_mechanism(z).self_compose(steps)
    composed = LossDistribution()
    composed._pld = raw
    # As dp_accounting has it; by how much depends on the processor.
    assert any(gaussian_delta(raw.get_epsilon_for_delta(delta), mu) > 1.1 * delta for delta in (1e-13, 1e-14, 1e-15))
    for delta in (1e-5, 1e-10, 1e-11, 1e-12, 1e-13, 1e-14):
        value = composed.get_epsilon(delta)
        assert value == math.inf or gaussian_delta(value, mu) <= delta
    for value in mu**2 / 2 + mu * np.arange(10):
        assert gaussian_delta(value, mu) <= composed.get_delta(value)
    assert math.isfinite(composed.get_epsilon(1e-10))
    assert composed.get_epsilon(1e-13) == math.inf


# -------------------------------------------------------------------------------------- what covers what; merging


def test_coverage_is_refused_or_nominal() -> None:
    lots = {fixed(4.0, 10, 1000): 50}
    with pytest.raises(ConfigurationError, match="pld accountant does not cover 'fixed_size'.*rdp"):
        epsilon(lots, DELTA, "pld")
    with pytest.raises(ConfigurationError, match="rdp-analytical accountant does not cover 'poisson'"):
        epsilon({poisson(1.0, 0.1): 1}, DELTA, "rdp-analytical")
    # Noise 4 over a sensitivity of 1 for a replaced record is noise 4 over ½ for an added one.
    nominal = epsilon(nominal_events(lots, "pld"), DELTA, "pld")
    assert nominal == pytest.approx(epsilon({poisson(8.0, 0.01): 50}, DELTA, "pld"))
    # With microbatches an added record moves the sum by two bounds as well.
    nominal = epsilon(nominal_events(lots, "pld", microbatch_size=4), DELTA, "pld")
    assert nominal == pytest.approx(epsilon({poisson(4.0, 0.01): 50}, DELTA, "pld"))
    assert nominal_events(lots, "rdp") == lots
    back = nominal_events({poisson(8.0, 0.01, 1000): 50}, "rdp-analytical")
    assert epsilon(back, DELTA, "rdp-analytical") == pytest.approx(epsilon(lots, DELTA, "rdp-analytical"))
    shuffled = {Event(ShuffledEpochs(1000, 10), (SumQuery("all", 1.0, 4.0),)): 50}
    with pytest.raises(ConfigurationError, match="no accountant covers 'shuffled_epochs'"):
        epsilon(shuffled, DELTA)
    assert epsilon(nominal_events(shuffled, "rdp"), DELTA) == pytest.approx(epsilon({poisson(4.0, 0.01): 50}, DELTA))


def test_relations_do_not_compose() -> None:
    with pytest.raises(ConfigurationError, match="do not compose into one epsilon"):
        epsilon({fixed(4.0, 10, 1000): 50, poisson(1.0, 0.1, 1000): 1}, DELTA, "rdp")


@pytest.mark.long
def test_many_distinct_releases_are_merged_to_the_costly_side() -> None:
    rng = np.random.default_rng(0)
    run = {poisson(float(z), 0.01): 1 for z in rng.uniform(1, 3, 150)}
    assert len(composable(run, "rdp")) <= 101
    assert sum(composable(run, "rdp").values()) == 150
    exact = ACCOUNTANTS["rdp"].epsilon(run, DELTA)
    assert exact <= epsilon(run, DELTA) <= exact * 1.01
    lots = {poisson(1.0 + 0.02 * i, 0.01 + 0.0001 * i): 10 for i in range(150)}  # too many kinds of lots to merge
    assert composable(lots, "rdp") == lots
    two = {poisson(float(z), q): 1 for q, low in ((0.01, 1.0), (0.02, 10.0)) for z in rng.uniform(low, 2 * low, 80)}
    assert epsilon(two, DELTA) <= ACCOUNTANTS["rdp"].epsilon(two, DELTA) * 1.03
    same = {poisson(1.0 + 1e-9 * i, 0.01): 1 for i in range(200)}  # apart by rounding only
    assert len(composable(same, "rdp")) == 1
    assert epsilon(same, DELTA) == pytest.approx(epsilon({poisson(1.0, 0.01): 200}, DELTA), rel=1e-4)


# -------------------------------------------------------------------------------------------------- selection


def test_selection_is_the_librarys_event() -> None:
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    run = {poisson(1.0, 0.01): 500}
    for shape in (0.0, 0.5, 1.0, math.inf):
        accountant = RdpAccountant()
        whole = dp_accounting.SelfComposedDpEvent(event, 500)
        accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(whole, 10.0, shape))
        ours = selection_epsilon([run], Selection(shape, 10.0), DELTA)
        assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
        assert epsilon(run, DELTA) < ours < epsilon({poisson(1.0, 0.01): 5000}, DELTA) * 2


def test_selection_charges_the_costliest_run() -> None:
    cheap, dear = {poisson(2.0, 0.01): 500}, {poisson(1.0, 0.01): 500}
    chosen = Selection(1.0, 10.0)
    assert selection_epsilon([cheap, dear], chosen, DELTA) == selection_epsilon([dear], chosen, DELTA)
    crossing = {poisson(0.6, 0.0005): 500}  # costs more at high orders, less at low ones
    together = selection_epsilon([crossing, dear], chosen, DELTA)
    assert together >= max(selection_epsilon([one], chosen, DELTA) for one in (crossing, dear))


def test_selection_is_refused_where_its_theorem_says_nothing() -> None:
    run = {poisson(1.0, 0.01): 10}
    with pytest.raises(ConfigurationError, match="known for Rényi accountants"):
        selection_epsilon([run], Selection(1.0, 10.0), DELTA, "pld")
    for shape, mean in ((-1.0, 10.0), (1.0, 0.5), (math.nan, 2.0), (1.0, math.inf)):
        with pytest.raises(ConfigurationError, match="a selection needs"):
            Selection(shape, mean)
    with pytest.raises(ConfigurationError, match="one neighboring relation"):
        selection_epsilon([run, {fixed(1.0, 10, 100): 10}], Selection(1.0, 10.0), DELTA)
    with pytest.raises(ConfigurationError, match="one neighboring relation"):
        selection_epsilon([{}], Selection(1.0, 10.0), DELTA)
