"""Budgets solved backwards, and forwards again."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.data.lots import Lots
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, PldAccountant
from dpbench.privacy.accounting.calibration import (
    TrainingSetting,
    affordable_releases,
    calibrate_scale,
    largest_count,
    solved,
)
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.tradeoff import MembershipTarget
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    SeparatedSampling,
    ShuffledEpochs,
    TruncatedPoissonSampling,
)

DELTA = 1e-5
UNKNOWNS = ("noise_multiplier", "sample_rate", "steps", "epsilon", "delta")


def event(z: float, q: float = 1.0, population: int = 60_000) -> Event:
    return Event(PoissonSampling(population, q), (SumQuery("all", 1.0, z),))


POISSON = TrainingSetting(noise_multiplier=1.1, sample_rate=0.01, steps=1000, delta=DELTA)
FIXED = TrainingSetting(
    noise_multiplier=2.0, sample_rate=0.02, steps=300, delta=1e-6, sampling="fixed_size", population=10_000
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "pld" else []) for name in ACCOUNTANTS]
)
@pytest.mark.parametrize(
    "setting", [POISSON, pytest.param(FIXED, marks=pytest.mark.slow)], ids=["poisson", "fixed_size"]
)
def test_each_from_the_others(setting: TrainingSetting, name: str) -> None:
    """σ, q, T, ε and δ, each left out in turn, come back to 0.1 %."""
    if setting.sampling not in ACCOUNTANTS[name].samplings:
        with pytest.raises(ConfigurationError, match="does not cover"):
            solved(setting, name)
        return
    whole = solved(setting, name)
    for unknown in UNKNOWNS:
        again = solved(replace(whole, **{unknown: None}), name)
        assert getattr(again, unknown) == pytest.approx(getattr(whole, unknown), rel=1e-3), unknown
        assert again.epsilon_by(name) <= whole.epsilon * (1 + 1e-9)  # never above the target


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(z=st.floats(0.6, 5), q=st.floats(1e-4, 0.2), steps=st.integers(1, 5000), delta=st.floats(1e-9, 1e-2))
def test_inverse_anywhere(z: float, q: float, steps: int, delta: float) -> None:
    given = TrainingSetting(noise_multiplier=z, sample_rate=q, steps=steps, delta=delta)
    if given.epsilon_by("rdp") < 1e-3:  # nothing to solve for
        return
    whole = solved(given)
    for unknown in ("noise_multiplier", "sample_rate", "delta"):
        again = solved(replace(whole, **{unknown: None}))
        assert again.epsilon_by("rdp") <= whole.epsilon * (1 + 1e-9)
        assert again.epsilon_by("rdp") >= whole.epsilon * (1 - 1e-3)
    assert solved(replace(whole, steps=None)).steps >= steps


@pytest.mark.parametrize("name", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_noise_for_a_target(name: str) -> None:
    for target in (0.5, 3.0):
        z = calibrate_scale(lambda z: Counter({event(z, 0.01): 500}), target, DELTA, name)
        assert target * 0.998 <= epsilon({event(z, 0.01): 500}, DELTA, name) <= target


@pytest.mark.long
def test_pld_beyond_rdp() -> None:
    """Millions of steps at tiny rates: pld rounds up so often that rdp is tighter; the search goes the other way."""
    many = replace(POISSON, sample_rate=1e-4, steps=None, noise_multiplier=1.0, epsilon=1.0)
    steps = solved(many, "pld").steps
    assert steps > 10**6
    assert replace(many, steps=steps).epsilon_by("pld") <= 1.0
    tiny = replace(POISSON, sample_rate=1e-5, steps=10**7)
    assert tiny.epsilon_by("pld") < solved(tiny, "rdp").epsilon
    wide = replace(POISSON, noise_multiplier=None, sample_rate=1e-3, steps=100, epsilon=0.05)  # rdp has a floor above
    assert 0.0499 < solved(wide, "pld").epsilon_by("pld") <= 0.05
    with pytest.raises(ConfigurationError, match=r"more than 1e\+07 steps"):
        solved(replace(many, sample_rate=1e-5, epsilon=3.0), "pld")
    with pytest.raises(ConfigurationError, match=r"more than 1e\+07 releases"):
        solved(replace(many, steps=10**8, epsilon=None), "pld")


def test_epochs_become_steps() -> None:
    setting = TrainingSetting(noise_multiplier=1.1, sample_rate=256 / 60_000, epochs=60, delta=DELTA)
    assert solved(setting).steps == 60 * 234  # batches are 234.4 in an epoch, of which a training makes 234
    rate = solved(replace(setting, sample_rate=None, epsilon=2.0)).sample_rate
    again = solved(replace(setting, sample_rate=rate))
    assert 1.9 < again.epsilon <= 2.0
    assert TrainingSetting(sample_rate=0.1, epochs=3).number_of_steps == 30  # 3 / 0.1 is below 30 in floating point
    assert TrainingSetting(sample_rate=0.256, epochs=3, population=1000).number_of_steps == 12
    assert TrainingSetting(sample_rate=0.256, epochs=0.6, population=1000).number_of_steps == 3  # 2.4 steps


SCHEMES = (
    PoissonSampling(1000, 0.256),
    PoissonSampling(1000, 0.7, unit="user"),
    FixedSizeSampling(1000, 300),
    FullParticipation(1000),
    TruncatedPoissonSampling.at_rate(1000, 0.256),
    CyclicPoissonSampling.at_rate(1000, 0.15).in_groups(4),
    SeparatedSampling(1000, 3),
    ShuffledEpochs(1000, 300),
)


@pytest.mark.parametrize("sampling", SCHEMES, ids=lambda sampling: f"{sampling.kind} {sampling.rate:.3g}")
def test_epochs_of_a_plan_are_those_of_a_loader(sampling: Sampling) -> None:
    """Lightning's `max_epochs` makes so many times the batches of the loader."""
    batches = len(list(Lots(sampling, seed=0)))
    for epochs in (1, 3, 7):
        assert sampling.steps_of(epochs) == epochs * batches
    if sampling.known_by_rate:
        bands = (1, 3) if sampling.kind == "poisson" and sampling.rate < 0.3 else (1,)
        for number in bands:
            setting = TrainingSetting(
                sample_rate=sampling.rate, epochs=3, population=1000, sampling=sampling.kind, bands=number
            )
            assert setting.number_of_steps == 3 * batches


def test_what_was_spent_counts() -> None:
    whole = solved(replace(POISSON, steps=1000))
    spent = {POISSON.event: 400}
    rest = solved(replace(whole, steps=None, spent=spent))
    assert rest.steps == 600
    z = solved(replace(whole, noise_multiplier=None, steps=600, spent=spent)).noise_multiplier
    assert z == pytest.approx(1.1, rel=1e-5)


@pytest.mark.slow
def test_affordable_releases() -> None:
    one = event(1.0, 0.01)

    def affordable(spent: dict[Event, int], name: str = "rdp", most: int = 10**7, ahead: Event = one) -> int:
        return affordable_releases(spent, lambda count: Counter({ahead: count}), most, 2.0, DELTA, name)

    for name in ("rdp", "pld"):
        count = affordable({}, name)
        assert epsilon({one: count}, DELTA, name) <= 2.0 < epsilon({one: count + 1}, DELTA, name)
    count = affordable({})
    assert affordable({}, most=10) == 10
    assert affordable({one: count}) == 0
    assert affordable({one: count - 3}) == 3
    assert affordable({event(0.1): 1}, most=100) == 0


ADVANTAGE = MembershipTarget(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("target", [ADVANTAGE, MembershipTarget(0.05, 0.01)], ids=str)
def test_within_a_membership_risk(target: MembershipTarget) -> None:
    """Noise, rate and steps, each left out in turn, use the budget up, and 2 % less noise exceeds it."""
    training = replace(POISSON, epsilon=None)
    whole = solved(replace(training, noise_multiplier=None), target=target)
    assert whole.noise_multiplier is not None
    assert target.risk_of(whole.events) <= target.limit
    less = replace(whole, noise_multiplier=0.98 * whole.noise_multiplier)
    assert target.risk_of(less.events) > target.limit
    assert whole.epsilon == whole.epsilon_by("rdp")
    whole = replace(whole, epsilon=None)
    rate = solved(replace(whole, sample_rate=None), target=target)
    assert rate.sample_rate == pytest.approx(whole.sample_rate, rel=1e-3)
    assert target.risk_of(rate.events) <= target.limit
    steps = solved(replace(whole, steps=None), target=target)
    assert steps.steps == pytest.approx(whole.steps, abs=1)
    assert target.risk_of(steps.events) <= target.limit and steps.steps is not None
    assert target.risk_of(replace(steps, steps=steps.steps + 1).events) > target.limit


def test_a_membership_risk_of_what_was_spent() -> None:
    training = replace(POISSON, epsilon=None, steps=None)
    whole = solved(training, target=ADVANTAGE)
    assert whole.steps is not None
    rest = solved(replace(training, spent={POISSON.event: 100}), target=ADVANTAGE)
    assert rest.steps == whole.steps - 100
    with pytest.raises(ConfigurationError, match="advantage=0.1 is out of reach"):
        solved(replace(training, spent={POISSON.event: 10 * whole.steps}), target=ADVANTAGE)


def test_no_membership_risk_to_stay_within() -> None:
    for limit in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ConfigurationError, match="advantage must lie strictly between 0 and 1"):
            MembershipTarget(limit)
    for limit, rate in ((0.01, 0.05), (0.1, 0.1), (0.1, 0.0), (1.0, 0.1), (0.1, math.nan)):
        with pytest.raises(ConfigurationError, match="the true positive rate must lie strictly between"):
            MembershipTarget(limit, rate)
    with pytest.raises(ConfigurationError, match=r"give epsilon=1 or advantage=0.1, not both"):
        solved(replace(POISSON, epsilon=1.0), target=ADVANTAGE)
    with pytest.raises(ConfigurationError, match=r"beside advantage=0.1: nothing is missing"):
        solved(replace(POISSON, epsilon=None), target=ADVANTAGE)
    tiny = replace(POISSON, epsilon=None, sample_rate=None, population=100)
    with pytest.raises(ConfigurationError, match="advantage=1e-06 is out of reach"):
        solved(tiny, target=MembershipTarget(1e-6))


@given(limit=st.integers(0, 10**6), most=st.integers(0, 10**7))
def test_largest_count(limit: int, most: int) -> None:
    assert largest_count(lambda count: count, limit, most) == min(limit, most)
    assert largest_count(lambda count: math.inf, limit, most) == 0


def test_exactly_one_is_missing() -> None:
    with pytest.raises(ConfigurationError, match="nothing is missing"):
        solved(replace(POISSON, epsilon=1.0))
    with pytest.raises(ConfigurationError, match="missing are noise_multiplier, epsilon"):
        solved(replace(POISSON, noise_multiplier=None))
    with pytest.raises(ConfigurationError, match="unknown accountant 'magic'"):
        solved(POISSON, "magic")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a number from 1e-12 to 1e\\+12, not 0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be"),
        ({"epsilon": math.inf}, "epsilon must be"),
        ({"steps": 0}, "steps must be"),
        ({"epochs": -1.0}, "epochs must be"),
        ({"sample_rate": 1.5}, "sample_rate must be a number from 1e-12 to 1, not 1.5"),
        ({"delta": 1.0}, "delta must lie strictly between 0 and 1"),
        ({"delta": 0.0}, "delta must lie"),
        ({"population": 0}, "population must be"),
        ({"sampling": "fixed_size"}, "need the population"),
    ],
)
def test_out_of_range(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(POISSON, **values)


def test_out_of_reach() -> None:
    """Each error says what the accountant can show."""
    target = replace(POISSON, epsilon=1e-9)
    with pytest.raises(ConfigurationError, match="epsilon=1e-09 is out of reach: with noise_multiplier=1e.04 it is"):
        solved(replace(target, noise_multiplier=None))
    with pytest.raises(ConfigurationError, match="epsilon=0.01 is out of reach: with sample_rate=1e-12 it is"):
        solved(replace(target, sample_rate=None, epsilon=0.01), "rdp-classic")  # log(1/δ)/511 at any rate
    with pytest.raises(ConfigurationError, match="epsilon=1e-09 is out of reach: with steps=1 it is"):
        solved(replace(target, steps=None))
    with pytest.raises(ConfigurationError, match="epsilon=1e-09 is out of reach: with steps=1 it is"):
        solved(replace(target, steps=None, spent={event(1.0): 3}))
    with pytest.raises(ConfigurationError, match="allows more than 1e.09 steps: no limit"):
        solved(replace(POISSON, noise_multiplier=1e4, steps=None, epsilon=100.0))
    with pytest.raises(ConfigurationError, match="shows an epsilon of 0: lower delta"):
        solved(TrainingSetting(noise_multiplier=2.0, sample_rate=1 / 64, steps=1, delta=1 / 128))
    with pytest.raises(ConfigurationError, match="delta is smaller than a number can be"):
        solved(replace(POISSON, delta=None, epsilon=10_000.0))
    with pytest.raises(ConfigurationError, match=r"not computed above an epsilon of 1e\+06"):
        solved(replace(POISSON, noise_multiplier=0.005), "pld")
    with pytest.raises(ConfigurationError, match="no noise_multiplier up to 10000 reaches.*shows .* there"):
        calibrate_scale(lambda z: Counter({event(z, 0.1): 1000}), 1e-9, DELTA)
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="target_epsilon"):
            calibrate_scale(lambda z: Counter({event(z, 0.1): 1000}), bad, DELTA)


def test_where_everything_fits() -> None:
    assert solved(replace(POISSON, sample_rate=None, epsilon=1e6)).sample_rate == 1.0
    least = solved(replace(POISSON, noise_multiplier=None, epsilon=1e9))
    assert 1e-4 < least.noise_multiplier < 1e-2
    assert solved(replace(least, epsilon=None)).epsilon == pytest.approx(1e9, rel=1e-6)


@pytest.mark.parametrize(
    ("population", "batch_size", "steps", "target"),
    [(1437, 64, 500, 3.0), (1437, 64, 200, 0.1), (100, 100, 50, 2.0), (1000, 50, 100, 150.0)],
)
def test_pld_solves_closely_from_few_of_its_epsilons(
    population: int,
    batch_size: int,
    steps: int,
    target: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    intervals = []
    composed = PldAccountant.composed

    def counting(self: PldAccountant, events: Any) -> Any:
        intervals.append(self.interval)
        return composed(self, events)

    def release(noise_multiplier: float) -> Event:
        return Event(PoissonSampling(population, batch_size / population), (SumQuery("all", 1.0, noise_multiplier),))

    monkeypatch.setattr(PldAccountant, "composed", counting)
    noise_multiplier = calibrate_scale(lambda z: Counter({release(z): steps}), target, 1e-5, "pld")
    assert len(intervals) <= 9
    spent = epsilon({release(noise_multiplier): steps}, 1e-5, "pld")
    assert (1 - 2e-5) * target <= spent <= target
    less = epsilon({release(noise_multiplier / (1 + 1e-4)): steps}, 1e-5, "pld")
    assert less > target
