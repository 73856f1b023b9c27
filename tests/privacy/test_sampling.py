"""Schemes of sampling: one class each, in a file of its own if need be; and what ledgers say of units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mpmath
import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from scipy import stats

from dpbench import DPSGD, PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.accountants import release_curve
from dpbench.privacy.accounting.calibration import TrainingSetting
from dpbench.privacy.accounting.composition import delta_of, epsilon, ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.events import Event, SumQuery, record_changes
from dpbench.privacy.sampling import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Positions,
    Sampling,
    SeparatedSampling,
    ShuffledEpochs,
    TruncatedPoissonSampling,
    find_scheme,
    sampling_from_dict,
    schemes,
)
from tests.strategies.worlds import Classifier, pictures, trainer_for

DELTA = 1e-3


@dataclass(frozen=True)
class TwoCoins(Sampling):
    """Each record throws two coins and is in the lot if both fall right: Poisson sampling, the rates multiplied."""

    first: float
    second: float

    kind = "two_coins"
    neighboring_relation = "add_or_remove_one"
    record_changes = 1
    whole_lots = False

    @classmethod
    def at_rate(cls, population: int, rate: float, unit: str = "example") -> Self:
        return cls(population, rate**0.5, rate**0.5, unit=unit)

    @property
    def expected_batch_size(self) -> float:
        return self.population * self.first * self.second

    def draw(self, rng: np.random.Generator) -> Sequence[Positions]:
        coins = rng.random((2, self.population))
        return (np.flatnonzero((coins[0] < self.first) & (coins[1] < self.second)),)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        return PoissonSampledDpEvent(self.first * self.second, GaussianDpEvent(noise_multiplier))


def test_a_scheme_of_ones_own(tmp_path: Path) -> None:
    """This file alone: it draws, is written, read, accounted for, and named in a configuration."""
    data = pictures()
    scheme = TwoCoins(len(data), 0.5, 0.4)
    loader = PrivateDataLoader(data, PrivateBatchSampler(scheme, seed=0))
    trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=DELTA, seed=0), 3).fit(Classifier(), loader)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert [release.sampling for _, release in ledger.releases] == [scheme] * 3
    same = {Event(PoissonSampling(60, 0.2), (SumQuery("all", 1.0, 1.0),)): 3}
    for accountant in ("rdp", "pld"):
        assert ledger_epsilon(ledger, DELTA, accountant) == pytest.approx(epsilon(same, DELTA, accountant), rel=1e-6)
    with pytest.raises(ConfigurationError, match="gdp accountant does not cover 'two_coins'.*rdp, pld, rdp-classic"):
        ledger_epsilon(ledger, DELTA, "gdp")  # no formula of its own was stated
    assert make_sampling("two_coins", 60, 12).expected_batch_size == pytest.approx(12)
    sizes = [len(PrivateBatchSampler(scheme, seed).lot(0)) for seed in range(400)]
    assert np.mean(sizes) == pytest.approx(12, abs=5 * (9.6 / 400) ** 0.5)


ADDED = {"neighboring_relation": "add_or_remove_one", "record_changes": 1}


@pytest.mark.parametrize(
    ("name", "base", "fields", "message"),
    [
        ("Sorted", PoissonSampling, {}, "Sorted must subclass Sampling itself and state its own kind"),
        ("Mine", Sampling, {"kind": "poisson"}, "Mine and PoissonSampling are both of kind 'poisson'"),
        ("Balanced", Sampling, {"kind": "b", "words": ("shuffled",)}, "Balanced and ShuffledEpochs are both called"),
        ("Nameless", Sampling, {}, "state its own kind"),
        ("Alone", Sampling, {"kind": "a", **ADDED}, "has neighbors, but no dp_event"),
        ("Less", Sampling, {"kind": "l", **ADDED, "neighboring_relation": "replace_one"}, "cannot move by 1 bounds"),
    ],
)
def test_no_scheme_passes_for_another(name: str, base: type[Sampling], fields: dict[str, Any], message: str) -> None:
    """Who overrides how Poisson lots are drawn would be accounted for, and read from ledgers, as Poisson sampling."""
    with pytest.raises(TypeError, match=message):
        type(name, (base,), fields)
    assert name not in {scheme.__name__ for scheme in schemes()}


def test_words_and_kinds() -> None:
    for word, kind in (("poisson", "poisson"), ("fixed", "fixed_size"), ("shuffled", "shuffled_epochs")):
        assert find_scheme(word) is find_scheme(kind)
        assert make_sampling(word, 20, 5).kind == kind
    with pytest.raises(ConfigurationError, match="unknown sampling 'poison'"):
        find_scheme("poison")


def test_the_unit_is_written_and_read() -> None:
    users = PoissonSampling(100, 0.1, unit="user")
    assert sampling_from_dict(users.to_dict()) == users
    old = FixedSizeSampling(100, 10).to_dict()
    assert old.pop("unit") == "example"
    assert sampling_from_dict(old) == FixedSizeSampling(100, 10)
    with pytest.raises(LedgerError, match="unit must be a word"):
        sampling_from_dict(users.to_dict() | {"unit": 3})


# ------------------------------------------------------------------------------------------------- truncated lots


def test_truncated_lots_are_drawn_as_they_say() -> None:
    """Sizes are binomial up to the largest, every record as likely as any other, the mean size what is divided by."""
    scheme, count = TruncatedPoissonSampling(30, 0.3, max_batch_size=10), 6000
    lots = PrivateBatchSampler(scheme, seed=1)
    drawn = [lots.lot(step) for step in range(count)]
    sizes = np.bincount([len(lot) for lot in drawn], minlength=11)
    wanted = stats.binom.pmf(np.arange(11), 30, 0.3)
    wanted[10] += stats.binom.sf(10, 30, 0.3)
    assert len(sizes) == 11 and all(len(set(lot.tolist())) == len(lot) for lot in drawn)
    pools = [[x[:5].sum(), *x[5:]] for x in (sizes, count * wanted)]
    assert stats.chisquare(*pools).pvalue > 1e-4
    assert scheme.expected_batch_size == pytest.approx(wanted @ np.arange(11), rel=1e-12)
    included = np.bincount(np.concatenate(drawn), minlength=30) / count
    share = scheme.expected_batch_size / 30
    assert np.abs(included - share).max() < 5 * (share / count) ** 0.5


def densities(population: int, rate: float, most: int, std: float, x: np.ndarray, present: bool) -> np.ndarray:
    """The released sum, by enumeration: the record contributes 1 and each other one −1, the worst that can be."""
    others = population - 1
    density = np.zeros_like(x)
    for drawn in range(others + 1):
        weight = stats.binom.pmf(drawn, others, rate)
        if not present:
            density += weight * stats.norm.pdf(x, -min(drawn, most), std)
            continue
        kept = min(1.0, most / (drawn + 1))  # of the record, if its coin falls right
        density += weight * rate * kept * stats.norm.pdf(x, 1 - min(drawn, most - 1), std)
        density += weight * (1 - rate * kept) * stats.norm.pdf(x, -min(drawn, most), std)
    return density


@pytest.mark.parametrize(("rate", "most"), [(1.0, 1), (0.3, 5)])
def test_truncated_lots_against_the_exact_release(rate: float, most: int) -> None:
    """One release of six records with and without one of them: both accountants bound its δ, closely where all are cut.

    An accountant that took a cut lot for an uncut one, or a record's place for nothing, would lie below.
    """
    std, eps, x = 2.0, 0.2, np.linspace(-30, 30, 6_001)
    with_it, without = (densities(6, rate, most, std, x, present) for present in (True, False))
    assert np.trapezoid(with_it, x) == pytest.approx(1) == np.trapezoid(without, x)
    gains = [np.clip(p - math.exp(eps) * q, 0, None) for p, q in ((with_it, without), (without, with_it))]
    true = max(float(np.trapezoid(gain, x)) for gain in gains)
    scheme = TruncatedPoissonSampling(6, rate, max_batch_size=most)
    release = {Event(scheme, (SumQuery("all", 2.0, std),)): 1}
    shown = {name: delta_of(release, eps, name) for name in ("pld", "rdp")}
    assert true <= min(shown.values())
    if (rate, most) == (1.0, 1):
        uncut = {Event(PoissonSampling(6, 1 / 6), (SumQuery("all", 1.0, std),)): 1}
        assert true > 1.5 * delta_of(uncut, eps, "pld")
        tight = {Event(PoissonSampling(6, 1 / 6), (SumQuery("all", 2.0, std),)): 1}
        assert true == pytest.approx(delta_of(tight, eps, "pld"), rel=1e-3)


def test_the_divergence_of_truncated_lots() -> None:
    """At whole orders against quadrature of ((1−t)·E₁ + t·E₂): each moment of a sampled Gaussian, many digits."""
    scheme, std = TruncatedPoissonSampling(40, 0.25, max_batch_size=12), 1.5
    orders = (2.0, 3.0, 8.0)
    query = SumQuery("all", 2.0, std)
    ours = release_curve(Event(scheme, (query,)), orders)
    full = stats.binom.sf(11, 39, 0.25)
    kept = sum(stats.binom.pmf(k, 39, 0.25) * 0.25 * 12 / (k + 1) for k in range(12, 40)) / full

    def moment(order: float, rate: float, z: float) -> mpmath.mpf:
        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            return (
                mpmath.npdf(x, 0, z) * (1 - rate + rate * mpmath.exp((2 * x - 1) / (2 * mpmath.mpf(z) ** 2))) ** order
            )

        return mpmath.quad(integrand, [-40 * z, -5 * z, 0, 5 * z, order + 5 * z, order + 40 * z])

    with mpmath.workdps(30):
        for order, value in zip(orders, ours, strict=True):
            mixed = (1 - full) * moment(order, 0.25, std) + full * moment(order, kept, std / 2)
            assert value == pytest.approx(float(mpmath.log(mixed) / (order - 1)), rel=1e-9)


def test_lots_that_are_never_cut_cost_what_poisson_lots_cost() -> None:
    never_cut, poisson = TruncatedPoissonSampling(1000, 0.05, max_batch_size=999), PoissonSampling(1000, 0.05)
    lots = Event(never_cut, (SumQuery("all", 2.0, 1.0),))  # a record that joins a lot that is cut displaces another one
    uncut = Event(poisson, (SumQuery("all", 1.0, 1.0),))
    assert epsilon({lots: 50}, DELTA) == pytest.approx(epsilon({uncut: 50}, DELTA), 1e-6)


def test_microbatches_of_truncated_lots_move_by_four_bounds() -> None:
    """A record that joins changes its microbatch, and the one that it displaces changes another."""
    scheme = TruncatedPoissonSampling(1000, 0.05, max_batch_size=60)
    assert record_changes(scheme) == 2
    assert record_changes(scheme, microbatch_size=4) == 4


ASKED_FOR = {
    "poisson": PoissonSampling(1500, 1 / 30),
    "everybody, by coins that always fall right": PoissonSampling(40, 1.0),
    "cyclic_poisson": CyclicPoissonSampling(1500, 1 / 30, cycle_length=8),
    "truncated_poisson": TruncatedPoissonSampling(1500, 1 / 30, max_batch_size=50),
    "cut nearly always": TruncatedPoissonSampling(1500, 0.2, max_batch_size=50, unit="user"),
    "fixed_size": FixedSizeSampling(1437, 64),
    "full": FullParticipation(240, unit="hospital"),
    "min_separation": SeparatedSampling(1440, 24, 5),
    "shuffled_epochs": ShuffledEpochs(1437, 64),
}


def test_every_scheme_is_asked_for() -> None:
    ours = {scheme.kind for scheme in schemes() if scheme.__module__.startswith("dpbench.")}
    assert {sampling.kind for sampling in ASKED_FOR.values()} == ours


@pytest.mark.parametrize("name", ASKED_FOR)
def test_added_records_change_the_population_and_nothing_else(name: str) -> None:
    """Largest lots, sizes and units are those that were asked for; of rates the number of records that are drawn."""
    asked = ASKED_FOR[name]
    lots = PrivateBatchSampler(asked, seed=0)
    lots.added = 300
    audited = lots.sampling
    expected = asked.to_dict() | {"population": asked.population + 300}
    if "sample_rate" in expected:
        expected["sample_rate"] = pytest.approx(expected["sample_rate"] * asked.population / audited.population)
    assert audited.to_dict() == expected
    if not asked.everybody and asked.kind != "min_separation":  # whose groups grow
        assert audited.expected_batch_size == pytest.approx(asked.expected_batch_size, rel=0.02)
    assert max(len(lots.lot(step)) + len(lots.added_in(step)) for step in range(40)) <= getattr(
        asked, "max_batch_size", audited.population
    )


def test_a_scheme_whose_parameters_are_not_known_by_its_rate_is_not_audited_as_another_one() -> None:
    lots = PrivateBatchSampler(TwoCoins(1000, first=0.1, second=0.9), seed=0)
    assert lots.sampling.rate == pytest.approx(0.09)
    lots.added = 100
    with pytest.raises(ConfigurationError, match=r"parameters of 'two_coins' batches.* define TwoCoins\.among\(\)"):
        _ = lots.sampling
    alike = PrivateBatchSampler(TwoCoins.at_rate(1000, 0.09), seed=0)
    alike.added = 100
    assert alike.sampling.expected_batch_size == pytest.approx(90)


def test_largest_lots_that_are_none() -> None:
    for most in (0, 2.5, True):
        with pytest.raises(ConfigurationError, match="max_batch_size must be a whole number of records, at least 1"):
            TruncatedPoissonSampling(60, 0.2, most)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cannot calibrate truncated_poisson batches"):
        TrainingSetting(1.0, 0.2, 10, delta=DELTA, sampling="truncated_poisson", population=60)


# ------------------------------------------------------------------------------------------ ledgers of two formats


def test_full_participation_is_poisson_sampling_of_everybody() -> None:
    scheme = make_sampling("full", 20, 20, "user")
    assert scheme == FullParticipation(20, unit="user") and scheme.steps_per_epoch == 1
    lots = PrivateBatchSampler(scheme, seed=0)
    assert all(sorted(lots.lot(step)) == list(range(20)) for step in range(3))
    full, poisson = ({Event(one, (SumQuery("all", 1.0, 8.0),)): 30} for one in (scheme, PoissonSampling(20, 1.0)))
    for accountant in ("rdp", "gdp"):
        assert epsilon(full, DELTA, accountant) == epsilon(poisson, DELTA, accountant)
    with pytest.raises(ConfigurationError, match="hold all 20 training users: set expected_batch_size=20"):
        make_sampling("full", 20, 10, "user")
