"""Budgets solved backwards, and forwards again."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import PldAccountant
from dpbench.privacy.accounting.calibration import (
    TrainingSetting,
    affordable_releases,
    calibrate_scale,
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


def event(z: float, q: float = 1.0, population: int = 60_000) -> Event:
    return Event(PoissonSampling(population, q), (SumQuery("all", 1.0, z),))


POISSON = TrainingSetting(noise_multiplier=1.1, sample_rate=0.01, steps=1000, delta=DELTA)
FIXED = TrainingSetting(
    noise_multiplier=2.0, sample_rate=0.02, steps=300, delta=1e-6, sampling="fixed_size", population=10_000
)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (POISSON, "rdp"),
        pytest.param(POISSON, "rdp-continuous", marks=pytest.mark.slow),
        pytest.param(POISSON, "pld", marks=pytest.mark.slow),
        pytest.param(POISSON, "gdp", marks=pytest.mark.slow),
        pytest.param(FIXED, "rdp-analytical", marks=pytest.mark.slow),
    ],
)
def test_each_from_the_others(setting: TrainingSetting, name: str) -> None:
    """σ, q, T, ε and δ, each left out in turn, come back to 0.1 %."""
    whole = solved(setting, name)
    for unknown in ("noise_multiplier", "sample_rate", "steps", "epsilon", "delta"):
        again = solved(replace(whole, **{unknown: None}), name)
        assert getattr(again, unknown) == pytest.approx(getattr(whole, unknown), rel=1e-3), unknown
        assert again.epsilon_by(name) <= whole.epsilon * (1 + 1e-9)  # never above the target


def test_epochs_become_steps() -> None:
    """As many batches as a loader has in an epoch."""
    for rate, epochs, population, bands, steps in (
        (256 / 60_000, 60, None, 1, 60 * 234),  # batches are 234.4 in an epoch, of which a training makes 234
        (0.1, 3, None, 1, 30),  # 3 / 0.1 is below 30 in floating point
        (0.256, 3, 1000, 1, 12),
        (0.256, 3, 1000, 3, 12),
    ):
        setting = TrainingSetting(sample_rate=rate, epochs=epochs, population=population, bands=bands)
        assert setting.number_of_steps == steps


SCHEMES = (
    PoissonSampling(1000, 0.256),
    PoissonSampling(1000, 0.7),
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
    batches = len(list(PrivateBatchSampler(sampling, seed=0)))
    assert [sampling.steps_of(epochs) for epochs in (1, 3)] == [batches, 3 * batches]


def test_what_was_spent_counts() -> None:
    whole = solved(replace(POISSON, steps=1000))
    spent = {POISSON.event: 400}
    rest = solved(replace(whole, steps=None, spent=spent))
    assert rest.steps == 600
    z = solved(replace(whole, noise_multiplier=None, steps=600, spent=spent)).noise_multiplier
    assert z == pytest.approx(1.1, rel=1e-5)


def test_affordable_releases() -> None:
    one = event(1.0, 0.01)

    def affordable(spent: int, most: int = 10**7) -> int:
        return affordable_releases({one: spent}, lambda count: Counter({one: count}), most, 2.0, DELTA, "rdp")

    count = affordable(0)
    assert epsilon({one: count}, DELTA) <= 2.0 < epsilon({one: count + 1}, DELTA)
    assert affordable(0, most=10) == 10
    assert affordable(count - 3) == 3
    assert affordable(count) == affordable(2 * count) == 0


ADVANTAGE = MembershipTarget(0.1)


@pytest.mark.slow
def test_within_a_membership_risk() -> None:
    """Noise, rate and steps, each left out in turn, use the budget up, and 2 % less noise exceeds it."""
    target = MembershipTarget(0.05, 0.01)
    whole = solved(replace(POISSON, noise_multiplier=None), target=target)
    assert whole.noise_multiplier is not None
    assert whole.epsilon == whole.epsilon_by("rdp")
    assert target.risk_of(whole.events) <= target.limit
    less = replace(whole, noise_multiplier=0.98 * whole.noise_multiplier)
    assert target.risk_of(less.events) > target.limit
    for name, tolerance in (("sample_rate", {"rel": 1e-3}), ("steps", {"abs": 1})):
        again = solved(replace(whole, epsilon=None, **{name: None}), target=target)
        assert getattr(again, name) == pytest.approx(getattr(whole, name), **tolerance)
        assert target.risk_of(again.events) <= target.limit


def test_no_membership_risk_to_stay_within() -> None:
    for limit in (0.0, 1.0):
        with pytest.raises(ConfigurationError, match="advantage must lie strictly between 0 and 1"):
            MembershipTarget(limit)
    for limit, rate in ((0.1, 0.1), (0.1, 0.0), (1.0, 0.1)):
        with pytest.raises(ConfigurationError, match="the true positive rate must lie strictly between"):
            MembershipTarget(limit, rate)
    tiny = replace(POISSON, sample_rate=None, population=100)
    for setting, target, message in (
        (replace(POISSON, epsilon=1.0), ADVANTAGE, "give epsilon=1 or advantage=0.1, not both"),
        (POISSON, ADVANTAGE, "given advantage=0.1 .none is missing"),
        (tiny, MembershipTarget(1e-6), "advantage=1e-06 is out of reach"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            solved(setting, target=target)


def test_exactly_one_is_missing() -> None:
    with pytest.raises(ConfigurationError, match="none is missing"):
        solved(replace(POISSON, epsilon=1.0))
    with pytest.raises(ConfigurationError, match="missing: noise_multiplier, epsilon"):
        solved(replace(POISSON, noise_multiplier=None))


def test_out_of_range() -> None:
    for values, message in (
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a number from 1e-12 to 1e\\+12, not 0"),
        ({"epsilon": math.inf}, "epsilon must be"),
        ({"sample_rate": 1.5}, "sample_rate must be a number from 1e-12 to 1, not 1.5"),
        ({"delta": 1.0}, "delta must lie strictly between 0 and 1"),
        ({"sampling": "fixed_size"}, "need the population"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            replace(POISSON, **values)


def test_out_of_reach() -> None:
    """Each error says what the accountant can show."""
    tiny: dict[str, Any] = {"epsilon": 1e-9}
    for values, name, message in (
        ({**tiny, "noise_multiplier": None}, "rdp", "epsilon=1e-09 is out of reach: with noise_multiplier=1e.04 it is"),
        # log(1/δ)/511 at any rate
        ({"sample_rate": None, "epsilon": 0.01}, "rdp-classic", "out of reach: with sample_rate=1e-12 it is"),
        ({**tiny, "steps": None}, "rdp", "epsilon=1e-09 is out of reach: with steps=1 it is"),
        (
            {"noise_multiplier": 1e4, "steps": None, "epsilon": 100.0},
            "rdp",
            "allows more than 1e.09 steps, the most that are computed",
        ),
        ({"noise_multiplier": 2.0, "steps": 1, "delta": 0.1}, "rdp", "shows an epsilon of only 0: lower delta"),
        ({"delta": None, "epsilon": 10_000.0}, "rdp", "underflows: lower epsilon"),
        ({"noise_multiplier": 0.005}, "pld", r"supports an epsilon of at most 1e\+06"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            solved(replace(POISSON, **values), name)
    with pytest.raises(ConfigurationError, match="no noise_multiplier up to 10000 reaches.*shows .* there"):
        calibrate_scale(lambda z: Counter({event(z, 0.1): 1000}), 1e-9, DELTA)
    with pytest.raises(ConfigurationError, match="target_epsilon"):
        calibrate_scale(lambda z: Counter(), 0.0, DELTA)


def test_where_everything_fits() -> None:
    assert solved(replace(POISSON, sample_rate=None, epsilon=1e6)).sample_rate == 1.0
    least = solved(replace(POISSON, noise_multiplier=None, epsilon=1e9))
    assert 1e-4 < least.noise_multiplier < 1e-2
    assert solved(replace(least, epsilon=None)).epsilon == pytest.approx(1e9, rel=1e-6)


def test_pld_solves_closely_from_few_of_its_epsilons(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, steps, target = 64 / 1437, 200, 0.1
    intervals = []
    composed = PldAccountant.composed

    def counting(self: PldAccountant, events: Any) -> Any:
        intervals.append(self.interval)
        return composed(self, events)

    monkeypatch.setattr(PldAccountant, "composed", counting)
    z = calibrate_scale(lambda z: Counter({event(z, rate): steps}), target, DELTA, "pld")
    assert len(intervals) <= 9
    spent = epsilon({event(z, rate): steps}, DELTA, "pld")
    assert (1 - 2e-5) * target <= spent <= target
    assert epsilon({event(z / (1 + 1e-4), rate): steps}, DELTA, "pld") > target
