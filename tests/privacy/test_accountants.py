"""Each accountant against closed forms, high-precision references, simulated worlds and other libraries."""

from __future__ import annotations

import json
import math
from pathlib import Path

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy import optimize
from scipy.stats import norm

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import (
    ACCOUNTANTS,
    LossDistribution,
    release_curve,
    rounding_of,
    theorem5_curve,
)
from dpbench.privacy.accounting.composition import (
    Selection,
    coarser_costs,
    composable,
    delta_of,
    epsilon,
    ledger_epsilon,
    nominal_events,
    selection_epsilon,
)
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.events import Event, SumQuery, effective_noise_multiplier
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, ShuffledEpochs
from tests.privacy.test_ledger import opened

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


@pytest.mark.parametrize(("z", "steps"), [(1.5, 1), (10.0, 30)])
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


# ------------------------------------------------------------------------------------------------- many digits


@pytest.mark.parametrize(("order", "z", "q"), [(1.5, 1.1, 0.004), (8.0, 1.5, 0.05)])
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


def test_theorem_5() -> None:
    """The sum itself, in integers and 60 digits, at orders up to 512."""
    z, batch_size = 0.5, 13
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


# --------------------------------------------------------------------------------------------- simulated worlds


def losses(z: float, q: float, steps: int, removed: bool, draws: int = 100_000) -> np.ndarray:
    """Privacy losses of T sampled Gaussian sums, in the world with or without a record that contributes 1."""
    rng = np.random.default_rng(1)
    total = np.zeros(draws)
    for _ in range(steps):
        present = 0.0 if removed else rng.random(draws) < q
        x = present + z * rng.standard_normal(draws)
        ratio = np.log1p(q * np.expm1((2 * x - 1) / (2 * z**2)))
        total += -ratio if removed else ratio
    return total


def test_two_point_worlds() -> None:
    """Simulated δ(ε) ≤ pld ≤ rdp; pld close to the simulation, so that the inequality means something."""
    z, q, steps, eps = 1.0, 0.3, 10, 1.5
    run = {poisson(z, q): steps}
    both = [losses(z, q, steps, removed) for removed in (False, True)]
    gains = [np.clip(-np.expm1(eps - loss), 0, None) for loss in both]
    true, error = max((float(gain.mean()), float(gain.std() / math.sqrt(len(gain)))) for gain in gains)
    pld = delta_of(run, eps, "pld")
    assert true - 4 * error <= pld <= true * 1.02 + 4 * error
    for name in ("rdp", "rdp-continuous", "rdp-classic"):
        assert pld <= delta_of(run, eps, name)


# ---------------------------------------------------------------------------------------------- other libraries


def test_opacus_prv_agrees_with_pld() -> None:
    from opacus.accountants import PRVAccountant

    theirs = PRVAccountant()
    theirs.history = [(1.1, 256 / 60_000, 8000)]
    value = theirs.get_epsilon(DELTA, eps_error=0.005, delta_error=DELTA / 1000)
    assert epsilon({poisson(1.1, 256 / 60_000): 8000}, DELTA, "pld") == pytest.approx(value, rel=0.01)


def test_published_values() -> None:
    """gradient_compression_denoising_2020, Table 1, and pyvacy_2019, section 5.1, to the printed digits."""
    for z, steps, printed in ((0.7, 12_000, 7.58), (1.1, 8000, 2.27)):
        run = {poisson(z, 256 / 60_000): steps}
        assert epsilon(run, DELTA, "rdp-classic") == pytest.approx(printed, abs=0.0051)
    assert epsilon(run, DELTA, "rdp") == pytest.approx(1.92, abs=0.005)
    assert epsilon(run, DELTA, "pld") == pytest.approx(1.754, abs=0.005)
    counts = {fixed(5.0, 100, 10**6): 200}
    assert epsilon(counts, 10**-6.6, "rdp") == pytest.approx(0.034, rel=0.01)


# --------------------------------------------------------------------------------------------------- properties


def usual(name: str, z: float, q: float) -> Event:
    """A release that an accountant covers."""
    return poisson(z, q) if "poisson" in ACCOUNTANTS[name].samplings else fixed(z, int(q * 1e5), 100_000)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_epsilon_and_delta_are_inverse(name: str) -> None:
    run = {usual(name, 1.0, 0.01): 1000}
    assert delta_of(run, epsilon(run, DELTA, name), name) == pytest.approx(DELTA, rel=1e-4)


@pytest.mark.parametrize("name", BOUNDS)
def test_no_bound_rounds_to_nothing(name: str) -> None:
    """Rates so small that moments round to one: an epsilon of zero would be a claim that nothing was released."""
    run = {poisson(1.0, 1e-9): 10**6} if "poisson" in ACCOUNTANTS[name].samplings else {fixed(1.0, 1, 10**9): 10**6}
    assert epsilon(run, 1e-12, name) > 0


def test_moments_that_cancel() -> None:
    """Much noise over many steps: a moment that rounds below one must not become an epsilon of zero."""
    for z, q, steps in ((1e5, 0.5, 10**12), (1e6, 1e-4, 10**15)):
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
    assert epsilon({poisson(0.01, 0.01): 1}, DELTA, "gdp") == math.inf
    assert delta_of({poisson(0.01, 0.01): 1}, 1.0, "gdp") == 1.0


def test_pld_near_an_exact_epsilon() -> None:
    """Wide intervals of losses cost less than a thousandth."""
    exact = dp_accounting.get_epsilon_gaussian(2e-3, DELTA)
    assert exact <= epsilon({poisson(2e-3, 1.0): 1}, DELTA, "pld") <= exact * (1 + 1e-3)


def test_no_delta_is_below_what_fourier_transforms_round() -> None:
    """Where δ vanishes in rounding there is no ε, instead of one that is too small, as dp_accounting has it."""
    z, steps = 100.0, 10_000
    mu = math.sqrt(steps) / z
    composed = LossDistribution()
    composed._pld = privacy_loss_distribution.from_gaussian_mechanism(z).self_compose(steps)
    for delta in (1e-5, 1e-10, 1e-12, 1e-14):
        value = composed.get_epsilon(delta)
        assert value == math.inf or gaussian_delta(value, mu) <= delta
    for value in mu**2 / 2 + mu * np.arange(10):
        assert gaussian_delta(value, mu) <= composed.get_delta(value)
    assert composed.get_epsilon(1e-10) < composed.get_epsilon(rounding_of(composed._pld)) == math.inf


# -------------------------------------------------------------------------------------- what covers what; merging


LOTS = fixed(4.0, 10, 1000)
SHUFFLED = Event(ShuffledEpochs(1000, 10), (SumQuery("all", 1.0, 4.0),))


def test_coverage_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pld accountant does not cover 'fixed_size'.*rdp"):
        epsilon({LOTS: 50}, DELTA, "pld")
    with pytest.raises(ConfigurationError, match="rdp-analytical accountant does not cover 'poisson'"):
        epsilon({poisson(1.0, 0.1): 1}, DELTA, "rdp-analytical")
    with pytest.raises(ConfigurationError, match="no accountant covers 'shuffled_epochs'"):
        epsilon({SHUFFLED: 50}, DELTA)


def test_other_sampling_is_taken_for_one_that_is_covered() -> None:
    for drawn, name, microbatch_size, taken in (
        # Noise 4 over a sensitivity of 1 for a replaced record is noise 4 over ½ for an added one.
        (LOTS, "pld", 1, poisson(8.0, 0.01)),
        # With microbatches an added record moves the sum by two bounds as well.
        (LOTS, "pld", 4, poisson(4.0, 0.01)),
        (LOTS, "rdp", 1, LOTS),
        (poisson(8.0, 0.01, 1000), "rdp-analytical", 1, LOTS),
        (SHUFFLED, "rdp", 1, poisson(4.0, 0.01)),
    ):
        nominal = nominal_events({drawn: 50}, name, microbatch_size)
        assert epsilon(nominal, DELTA, name) == pytest.approx(epsilon({taken: 50}, DELTA, name))


def test_relations_do_not_compose() -> None:
    with pytest.raises(ConfigurationError, match="do not compose into one epsilon"):
        epsilon({fixed(4.0, 10, 1000): 50, poisson(1.0, 0.1, 1000): 1}, DELTA, "rdp")


def test_many_distinct_releases_are_merged_to_the_costly_side() -> None:
    run = {poisson(1 + 0.01 * i, 0.01): 1 for i in range(150)}
    merged = composable(run, "rdp")
    assert len(merged) <= 101 and sum(merged.values()) == 150
    for event, coarser in coarser_costs(run).items():
        z, less = (effective_noise_multiplier(one.queries) for one in (event, coarser))
        assert 0.98 * z <= less <= z
    lots = {poisson(1.0, 0.01 + 0.0001 * i): 10 for i in range(150)}  # too many kinds of lots to merge
    assert composable(lots, "rdp") == lots


# -------------------------------------------------------------------------------------------------- selection


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_selection_is_the_librarys_event(shape: float) -> None:
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.0))
    whole = dp_accounting.SelfComposedDpEvent(event, 500)
    accountant = RdpAccountant()
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(whole, 10.0, shape))
    ours = selection_epsilon([{poisson(1.0, 0.01): 500}], Selection(shape, 10.0), DELTA)
    assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)


def test_selection_charges_the_costliest_run() -> None:
    """At every order: one run costs more at high orders, another one at low ones."""
    chosen = Selection(1.0, 10.0)
    runs = [{poisson(0.6, 0.0005): 500}, {poisson(1.0, 0.01): 500}]
    together = selection_epsilon([*runs, {poisson(2.0, 0.01): 500}], chosen, DELTA)
    assert together == selection_epsilon(runs, chosen, DELTA)
    assert together >= max(selection_epsilon([run], chosen, DELTA) for run in runs)


def test_selection_is_refused_where_its_theorem_says_nothing() -> None:
    run = {poisson(1.0, 0.01): 10}
    selection = Selection(1.0, 10.0)
    with pytest.raises(ConfigurationError, match="known for Rényi accountants"):
        selection_epsilon([run], selection, DELTA, "pld")
    for shape, mean in ((-1.0, 10.0), (1.0, 0.5), (math.nan, 2.0), (1.0, math.inf)):
        with pytest.raises(ConfigurationError, match="a selection needs"):
            Selection(shape, mean)
    for runs in ([run, {LOTS: 10}], [{}]):
        with pytest.raises(ConfigurationError, match="the same neighboring relation"):
            selection_epsilon(runs, selection, DELTA)


# -------------------------------------------------------------------------------------------------- compositions


def test_clear_errors() -> None:
    with pytest.raises(ConfigurationError, match="unknown accountant 'magic'; known are rdp, pld"):
        epsilon({}, DELTA, "magic")
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ConfigurationError, match="delta must lie"):
            epsilon({}, delta)


def test_an_independent_accountant_reads_the_ledger(tmp_path: Path) -> None:
    """From the file alone, with Opacus' accountant, the same epsilon as ours."""
    from opacus.accountants import RDPAccountant

    path = tmp_path / "l"
    sampling = PoissonSampling(1000, 0.02)
    with opened(path, Header("example", "add_or_remove_one", 1000, DELTA)) as writer:
        for number in range(100):
            queries = (SumQuery("a", 0.6, 1.5 if number < 50 else 2.0), SumQuery("b", 0.8, 1.5))
            writer.append(Release(number, sampling, queries))
    theirs = RDPAccountant()
    for line in path.read_text().splitlines()[1:]:
        data = json.loads(line)
        z = sum((query["sensitivity"] / query["noise_std"]) ** 2 for query in data["queries"]) ** -0.5
        theirs.step(noise_multiplier=z, sample_rate=data["sampling"]["sample_rate"])
    assert ledger_epsilon(read_ledger(path), DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)
