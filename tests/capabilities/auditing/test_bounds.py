"""Lower bounds on epsilon: against jax_privacy's, against closed forms, and valid in simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import dp_accounting
import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from dpbench.capabilities.auditing.declared import least_ratio, release_game
from dpbench.capabilities.auditing.family import Family, reached
from dpbench.capabilities.auditing.independent import auc, auc_lower, clopper_pearson_lower, clopper_pearson_upper
from dpbench.capabilities.auditing.one_run import (
    MOST_EPSILON,
    Guesses,
    count_right,
    largest_refuted,
    one_run,
    one_run_fdp,
    one_run_p_value,
)
from dpbench.capabilities.canaries.scores import GameSums
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import Header, Ledger, Release
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    ShuffledEpochs,
)


def gaussian(mu: float, alpha: float) -> float:
    """Trade-off curve of one Gaussian mechanism."""
    return float(stats.norm.cdf(stats.norm.isf(alpha) - mu))


@pytest.mark.parametrize(("guesses", "right", "delta"), [(200, 160, 1e-2), (500, 500, 0.0)])
def test_p_values_are_those_of_jax_privacy(guesses: int, right: int, delta: float) -> None:
    peer = pytest.importorskip("jax_privacy.auditing")
    for eps in (0.0, 1.0, 8.0):
        ours = one_run_p_value(2000, guesses, right, eps, delta)
        assert ours == pytest.approx(peer._one_run_p_value(2000, guesses, right, eps, delta), abs=1e-12)


def test_bounds_with_a_trade_off_curve_are_those_of_jax_privacy() -> None:
    peer, delta, level = pytest.importorskip("jax_privacy.auditing"), 1e-5, 0.05
    rng = np.random.default_rng(0)
    member = rng.random(1000) < 0.5
    scores = rng.standard_normal(1000) + 2.5 * member
    made, right = int((scores >= 1.8).sum()), int((scores[member] >= 1.8).sum())
    assert count_right(scores, member, Guesses(made, 0)) == right

    def refuted(eps: float) -> bool:
        mu = 1 / dp_accounting.get_sigma_gaussian(eps, delta) if eps else 0.0
        return one_run_fdp(1000, made, right, partial(gaussian, mu), level)

    auditor = peer.CanaryScoreAuditor(scores[member], scores[~member])
    theirs = auditor.epsilon_one_run_fdp(level, delta, threshold_strategy=peer.Explicit(1.8))
    assert largest_refuted(refuted) == pytest.approx(theirs, abs=2e-3)
    assert theirs > one_run(1000, made, right, delta, level) > 1
    assert auc(scores, member)[0] == pytest.approx(roc_auc_score(member, scores), abs=1e-12)


def test_limits_of_a_probability_are_clopper_and_pearsons() -> None:
    for count in (0, 7, 400):
        ours = clopper_pearson_lower(count, 400, 0.05), clopper_pearson_upper(count, 400, 0.05)
        assert ours == pytest.approx(stats.binomtest(count, 400).proportion_ci(0.9, "exact"))


@pytest.mark.parametrize("shift", [1.5, 6.0])
def test_auc_limits_miss_the_truth_as_often_as_they_may(shift: float) -> None:
    """Also where only a handful of pairs, or none, is in the wrong order."""
    rng, missed, member = np.random.default_rng(0), 0, np.arange(400) % 2 == 0
    truth = stats.norm.cdf(shift / math.sqrt(2))
    for _ in range(200):
        missed += auc_lower(rng.standard_normal(400) + shift * member, member, 0.05) > truth
    assert missed <= stats.binom.isf(1e-3, 200, 0.05)
    assert auc_lower(np.zeros(400), member, 0.05) <= 0.5 and auc_lower(np.zeros(2), np.ones(2, bool), 0.05) == 0


def test_best_possible_attackers_are_not_above_the_one_run_bound() -> None:
    """Randomized response is exactly ε-DP: the bound exceeds its ε at most at the nominal rate, and comes near."""
    right = np.random.default_rng(1).binomial(200, math.exp(2) / (1 + math.exp(2)), 300)
    bounds = np.array([one_run(1000, 200, count, 1e-5, 0.05) for count in right.tolist()])
    assert np.mean(bounds > 2) <= 0.08 and np.median(bounds) > 1.5
    assert one_run(1000, 200, 100, 1e-5, 0.05) == 0
    assert largest_refuted(lambda eps: True) == MOST_EPSILON


def test_trade_off_curve_of_a_gaussian_is_its_closed_form() -> None:
    family = Family({Event(FullParticipation(1000), (SumQuery("all", 2.0, 4.0),)): 4}, 1e-5)  # μ = 1
    for scale, mu in ((0.5, 2.0), (2.0, 0.5)):
        curve = family.curve(scale)
        exact, ours = np.array([(gaussian(mu, alpha), curve(alpha)) for alpha in np.linspace(0, 1, 101)]).T
        assert (ours <= exact + 1e-9).all()
        np.testing.assert_allclose(ours, exact, atol=2e-3)
        area = stats.norm.cdf(mu / math.sqrt(2))
        assert area - 1e-9 <= 1 - curve.area < area + 1e-3
        assert family.epsilon(scale) == pytest.approx(epsilon(family.scaled(scale), 1e-5, "pld"), rel=1e-3)


def test_family_finds_the_noise_that_a_test_refutes() -> None:
    family = Family({Event(FullParticipation(1000), (SumQuery("all", 1.0, 2.0),)): 4}, 1e-5)  # μ = 1 / scale
    for mu in (0.999, 3.0):
        area = stats.norm.cdf(mu / math.sqrt(2))
        scale = family.smallest_refuted(lambda curve, area=area: area > 1 - curve.area)
        assert (1 - 1e-3) / mu <= scale <= 1.02 / mu
    assert family.smallest_refuted(lambda curve: False) == math.inf
    least = family.smallest_refuted(lambda curve: True)  # so little noise that tables would take hours
    assert 20 < family.epsilon(least) < 100 < family.epsilon(least / 10) < family.epsilon(0)
    assert family.epsilon(0.9) > family.claimed > family.epsilon(1.1) > family.epsilon(1e9) >= 0


def test_lots_that_an_accountant_does_not_cover_have_a_reason() -> None:
    query = (SumQuery("all", 1.0, 1.0),)
    fixed = Family({Event(FixedSizeSampling(1000, 50), query): 10}, 1e-5)
    assert fixed.accountant == "rdp" and fixed.uncovered is not None and "fixed_size" in fixed.uncovered
    assert fixed.claimed == epsilon(fixed.events, 1e-5, "rdp") < fixed.epsilon(0.8) < math.inf
    with pytest.raises(ConfigurationError, match="no trade-off curve: .*fixed_size batches"):
        fixed.curve(1.0)
    shuffled = Family({Event(ShuffledEpochs(1000, 50), query): 10}, 1e-5)
    assert shuffled.accountant is None and shuffled.claimed == shuffled.epsilon(2.0) == math.inf
    large = Family({Event(FullParticipation(1000), query): 1000}, 1e-5)
    assert large.accountant == "rdp" and "so large" in (large.uncovered or "")


def book(sampling: Sampling, *queries: SumQuery, releases: int = 1) -> Ledger:
    header = Header(sampling.unit, sampling.neighboring_relation, sampling.population, 1e-3)
    return Ledger([header], [(0, Release(number, sampling, queries)) for number in range(releases)])


@pytest.mark.parametrize(("batch_size", "scale"), [(50, 0.8), (1000, 1.0)])
def test_what_fixed_lots_reach_is_a_pair_of_neighbors(batch_size: int, scale: float) -> None:
    """One release of the sum over a lot of which all records but one are at −C, and that one at C or replaced by −C."""
    bound, std, rate = 1.5, 2.0, batch_size / 1000
    ledger = book(FixedSizeSampling(1000, batch_size), SumQuery("all", 2 * bound, std))
    family = Family(ledger.events, 1e-3)

    def delta(epsilon: float, there: float) -> float:  # over x − (−B·C), both orders of the pair
        x, step = np.linspace(-40, 40, 400_001, retstep=True)
        gone, drawn = stats.norm.pdf(x, 0, there), stats.norm.pdf(x, 2 * bound, there)
        pair = gone, (1 - rate) * gone + rate * drawn
        return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * step) for p, q in (pair, pair[::-1]))

    least = reached(ledger, family).epsilon(scale)
    assert delta(least, std * scale) == pytest.approx(1e-3, rel=0.02)
    assert least <= family.epsilon(scale)  # which was no lower bound


def test_statistics_of_fixed_lots_count_as_ignored() -> None:
    """A norm lies in [0, b], so that no replacement moves it by the 2b that are declared."""
    queries = SumQuery("all", 2.0, 4.0), SumQuery("norm/all", 2.0, 3.0), SumQuery("metric/accuracy", 2.0, 9.0)
    both = book(FixedSizeSampling(1000, 1000), *queries, releases=9)
    family = Family(both.events, 1e-3)
    alone = epsilon({Event(FullParticipation(1000), queries[:1]): 9}, 1e-3, "pld")
    assert reached(both, family).epsilon(1.0) == pytest.approx(alone, rel=2e-3) and family.claimed > 1.2 * alone
    poisson = book(PoissonSampling(1000, 0.5), *queries)
    own = Family(poisson.events, 1e-3)
    assert reached(poisson, own) is own


SCORES = np.arange(40.0)
MEMBER = np.arange(40) >= 20
SUMS = GameSums()
BY_LEVEL: dict[str, Callable[[float], object]] = {
    "clopper_pearson_upper": lambda level: clopper_pearson_upper(40, 40, level),
    "clopper_pearson_lower": lambda level: clopper_pearson_lower(0, 40, level),
    "auc_lower": lambda level: auc_lower(SCORES, MEMBER, level),
    "one_run": lambda level: one_run(40, 20, 20, 1e-5, level),
    "one_run_fdp": lambda level: one_run_fdp(40, 20, 20, partial(gaussian, 1.0), level),
    "release_game": lambda level: release_game(SUMS, level),
    "least_ratio": lambda level: least_ratio(SUMS, level),
}
BY_DELTA: dict[str, Callable[[float], object]] = {
    "one_run_p_value": lambda delta: one_run_p_value(40, 20, 20, 1.0, delta),
    "one_run": lambda delta: one_run(40, 20, 20, delta, 0.05),
}


@pytest.mark.parametrize("level", [-0.1, 0.0, 1.0, 95.0, math.nan])
@pytest.mark.parametrize("function", BY_LEVEL)
def test_a_level_that_is_no_probability_of_an_error_is_refused(function: str, level: float) -> None:
    with pytest.raises(ConfigurationError, match=f"level must lie strictly between 0 and 1, not {level}"):
        BY_LEVEL[function](level)


@pytest.mark.parametrize("delta", [-1e-5, 1.0, 2.0, math.nan])
@pytest.mark.parametrize("function", BY_DELTA)
def test_a_delta_of_no_claim_is_refused(function: str, delta: float) -> None:
    with pytest.raises(ConfigurationError, match=f"delta must be at least 0 and below 1, not {delta}"):
        BY_DELTA[function](delta)


def test_a_claim_may_have_no_delta_and_a_level_may_be_near_its_ends() -> None:
    assert one_run(1000, 100, 90, delta=0.0, level=0.05) > one_run(1000, 100, 90, delta=1e-5, level=0.05)
    assert clopper_pearson_upper(0, 100, 1e-9) > clopper_pearson_upper(0, 100, 1 - 1e-9)
