"""What the end of the noise leaves uncovered: by closed forms, by counting, and in ledgers of every version."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpbench.harness.reports.account import AccountingRequest, account
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.tails import OLDEST_END, STATED_BEFORE, mass_beyond, uncovered_delta, uncovered_mass
from dpbench.privacy.events import NOISE_END, Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling
from tests.privacy.test_ledger import opened


def release(population: int, rate: float, z: float) -> Event:
    return Event(PoissonSampling(population, rate), (SumQuery("all", 1.0, z),))


def write(path: Path, z: float, steps: int, end: float | None) -> Path:
    sampling = PoissonSampling(60_000, 256 / 60_000)
    header = Header("example", sampling.neighboring_relation, sampling.population, 1e-5, noise_end=end)
    with opened(path / "ledger.jsonl", header) as writer:
        for number in range(steps):
            writer.append(Release(number, sampling, (SumQuery("all", 1.0, z),)))
    return path


@pytest.mark.parametrize(("z", "end"), [(4.0, 2.0), (0.5, OLDEST_END), (0.1, NOISE_END)])
def test_one_coordinate_is_a_closed_form(z: float, end: float) -> None:
    wanted = stats.norm.sf(end - 1 / z) - stats.norm.sf(end)
    assert mass_beyond(z, end, coordinates=1) == pytest.approx(wanted, rel=1e-9)
    assert mass_beyond(z, end, coordinates=1) <= mass_beyond(z, end, 1000) <= mass_beyond(z, end)


def test_it_bounds_what_is_counted() -> None:
    """Noise cut at 2.5 standard deviations, and a record that moves 16 coordinates by 1/z together."""
    z, end, rounds = 0.7, 2.5, 40_000
    noise = stats.truncnorm.rvs(-end, end, size=(rounds, 16), random_state=np.random.default_rng(0))
    share = (noise + 1 / (4 * z) > end).any(1).mean()
    most = mass_beyond(z, end, 16) / (1 - 2 * stats.norm.sf(end))
    assert share < most + 4 * math.sqrt(most / rounds)


def test_what_samplers_of_24_bits_leave_uncovered() -> None:
    """Figures that were counted and computed otherwise: by the 2^24 radii of that sampler."""
    for population, rate, z, steps, lost in (
        (60_000, 256 / 60_000, 1.1, 8000, 1.99e-5),
        (539, 50 / 539, 0.3, 40, 2.7e-2),
    ):
        made = {release(population, rate, z): steps}
        assert uncovered_mass(made, OLDEST_END, 1) == pytest.approx(lost, rel=0.02)
        assert uncovered_mass(made, NOISE_END) < 1e-14


def test_an_old_ledger_has_the_same_epsilon_and_one_line_more(tmp_path: Path) -> None:
    runs = {end: write(tmp_path / str(end), 1.1, 500, end) for end in (None, NOISE_END)}
    old, new = (account([run], AccountingRequest()).text.splitlines() for run in runs.values())
    assert len(old) == len(new) + 1
    (more,) = set(old) - set(new)
    assert more.startswith("uncovered delta") and "at least 1.2e-06" in more and "5.77" in more
    both = [read_ledger(run / "ledger.jsonl") for run in runs.values()]
    assert ledger_epsilon(both[0], 1e-5) == ledger_epsilon(both[1], 1e-5)
    assert uncovered_delta(both[1]) < 1e-14 < uncovered_delta(both[0])


def test_ends_that_were_stated_too_far_are_corrected(tmp_path: Path) -> None:
    before, now = (write(tmp_path / str(end), 0.3, 100, end) / "ledger.jsonl" for end in (STATED_BEFORE, NOISE_END))
    events = read_ledger(before).events
    wanted = uncovered_mass(events, math.sqrt(2 * 54 * math.log(2)))
    assert uncovered_delta(read_ledger(before)) == pytest.approx(wanted, rel=1e-6)
    line = account([write(tmp_path / "worse", 0.2, 100, STATED_BEFORE)], AccountingRequest()).text
    assert "noise ends at 8.65" in line
    assert uncovered_delta(read_ledger(now)) < 1e-10 < uncovered_delta(read_ledger(before))


def test_headers_say_where_noise_ends(tmp_path: Path) -> None:
    for end in (NOISE_END, None):  # None: an older version's
        header = read_ledger(write(tmp_path / str(end), 1.0, 1, end) / "ledger.jsonl").header
        assert header.noise_end == end
    for wrong in ("far", 0, -1.0, True):
        with pytest.raises(ValueError, match="noise_end"):
            replace(header, noise_end=wrong)
