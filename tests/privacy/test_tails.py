"""What the end of the noise leaves uncovered: by closed forms, by counting, and in ledgers of every version."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dpbench.harness.reports.account import AccountingRequest, account
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.tails import OLDEST_END, mass_beyond, uncovered_delta, uncovered_mass
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import NOISE_END, Event, SumQuery
from dpbench.privacy.sampling import PoissonSampling


def release(population: int, rate: float, z: float) -> Event:
    return Event(PoissonSampling(population, rate), (SumQuery("all", 1.0, z),))


def write(path: Path, z: float, steps: int, end: float | None, delta: float = 1e-5) -> Path:
    sampling = PoissonSampling(60_000, 256 / 60_000)
    header = Header("example", sampling.neighboring_relation, sampling.population, delta, noise_end=end)
    path.mkdir()
    writer = LedgerWriter(path / "ledger.jsonl", header)
    for number in range(steps):
        writer.append(Release(number, sampling, (SumQuery("all", 1.0, z),)))
    writer.close()
    return path


@pytest.mark.parametrize("z", [0.1, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("end", [2.0, OLDEST_END, 7.447, NOISE_END])
def test_one_coordinate_is_a_closed_form(z: float, end: float) -> None:
    wanted = stats.norm.sf(end - 1 / z) - stats.norm.sf(end)
    assert mass_beyond(z, end, coordinates=1) == pytest.approx(wanted, rel=1e-9)
    assert mass_beyond(z, end, coordinates=1) <= mass_beyond(z, end, 1000) <= mass_beyond(z, end)


@pytest.mark.parametrize(("coordinates", "moved"), [(1, 1), (16, 1), (16, 16), (300, 300)])
def test_it_bounds_what_is_counted(coordinates: int, moved: int) -> None:
    """Noise cut at 2.5 standard deviations, and a record that moves some coordinates by 1/z together."""
    z, end, rounds = 0.7, 2.5, 40_000
    rng = np.random.default_rng(coordinates + moved)
    noise = stats.truncnorm.rvs(-end, end, size=(rounds, moved), random_state=rng)
    share = (noise + 1 / (z * math.sqrt(moved)) > end).any(1).mean()
    most = mass_beyond(z, end, coordinates) / (1 - 2 * stats.norm.sf(end))
    assert share < most + 4 * math.sqrt(most / rounds)
    if moved == 1:
        least = mass_beyond(z, end, 1)
        assert share > least - 4 * math.sqrt(least / rounds)


@pytest.mark.parametrize(
    ("population", "rate", "z", "steps", "lost"),
    [
        (60_000, 256 / 60_000, 1.1, 8000, 1.99e-5),
        (60_000, 256 / 60_000, 0.879, 8000, 6.20e-5),
        (10_000, 0.033, 1 / 1.404, 200, 4.21e-5),
        (539, 50 / 539, 0.3, 40, 2.7e-2),
    ],
)
def test_what_samplers_of_24_bits_leave_uncovered(
    population: int, rate: float, z: float, steps: int, lost: float
) -> None:
    """Figures that were counted and computed otherwise: by the 2^24 radii of that sampler."""
    made = {release(population, rate, z): steps}
    assert uncovered_mass(made, OLDEST_END, 1) == pytest.approx(lost, rel=0.02)
    assert uncovered_mass(made, NOISE_END) < 1e-14


def test_releases_add_up_and_nothing_is_above_one() -> None:
    one = release(1000, 0.01, 0.2)
    assert uncovered_mass({one: 10}, OLDEST_END, 1) == pytest.approx(
        1 - (1 - uncovered_mass({one: 1}, OLDEST_END, 1)) ** 10
    )
    assert uncovered_mass({release(1000, 1.0, 0.01): 5}, NOISE_END) == pytest.approx(1)
    assert uncovered_mass({}, NOISE_END) == 0


def test_an_old_ledger_has_the_same_epsilon_and_one_line_more(tmp_path: Path) -> None:
    texts = {}
    for name, end in (("old", None), ("new", NOISE_END)):
        run = write(tmp_path / name, 1.1, 2000, end)
        texts[name] = account([run], AccountingRequest()).text.splitlines()
    assert len(texts["old"]) == len(texts["new"]) + 1
    (more,) = set(texts["old"]) - set(texts["new"])
    assert more.split()[:3] == ["uncovered", "delta", "5e-06"] and "5.77" in more
    old, new = (read_ledger(tmp_path / name / "ledger.jsonl") for name in ("old", "new"))
    assert ledger_epsilon(old, 1e-5) == ledger_epsilon(new, 1e-5)
    assert uncovered_delta(new) < 1e-14 < uncovered_delta(old)
    together = account([tmp_path / "old", tmp_path / "new"], AccountingRequest()).text
    assert together.count("uncovered delta") == 1


def test_noise_so_small_that_its_end_shows_is_trained_and_told(tmp_path: Path) -> None:
    report = account([write(tmp_path / "run", 0.1, 50, NOISE_END)], AccountingRequest())
    assert report.facts["uncovered_delta"] == pytest.approx(1 - (1 - 0.0668 * 256 / 60_000) ** 50, rel=0.01)
    assert "noise ends at 11.5 standard deviations" in report.text
    assert "uncovered" not in account([write(tmp_path / "other", 0.3, 50, NOISE_END)], AccountingRequest()).text


def test_headers_say_where_noise_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1.0, 1, NOISE_END) / "ledger.jsonl"
    assert read_ledger(path).header.noise_end == NOISE_END
    header, *rest = path.read_text().splitlines()
    facts = json.loads(header)
    del facts["noise_end"]
    path.write_text("\n".join([json.dumps(facts), *rest]) + "\n")
    assert read_ledger(path).header.noise_end is None  # an older version's
    for wrong in ("far", 0, -1.0, True):
        with pytest.raises(ValueError, match="noise_end"):
            Header(**{**asdict(read_ledger(path).header), "noise_end": wrong})
