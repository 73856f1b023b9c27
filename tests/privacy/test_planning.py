"""A run accounted for as if it had had more users: nominal, and always called so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon, ledger_epsilon
from dpbench.privacy.accounting.ledger import Header, Ledger, Release, read_ledger
from dpbench.privacy.accounting.planning import at_population
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, Sampling, TruncatedPoissonSampling
from tests.harness.runs.test_ledgers import by_result
from tools.golden.ledgers import FOLDER


def ledger_of(sampling: Sampling) -> Ledger:
    header = Header("user", sampling.neighboring_relation, sampling.population, 1e-3)
    queries = (SumQuery("all", 1.0, 0.3), SumQuery("clipped/all", 0.5, 2.5))
    return Ledger([header], [(0, Release(number, sampling, queries)) for number in range(40)])


def test_lots_and_noise_grow_alike() -> None:
    """Adaptive clipping, section 4, step 3: (m, z) becomes α(m, z)."""
    grown = at_population(ledger_of(PoissonSampling(539, 50 / 539, unit="user")), 1_000_000, 5_000)
    wanted = PoissonSampling(1_000_000, 0.005, unit="user")
    queries = (SumQuery("all", 1.0, 30.0), SumQuery("clipped/all", 0.5, 250.0))
    assert grown.header.population == 1_000_000
    assert ledger_epsilon(grown, 1e-7) == pytest.approx(epsilon({Event(wanted, queries): 40}, 1e-7), rel=1e-9)


def test_only_the_rate_falls() -> None:
    same = at_population(ledger_of(FixedSizeSampling(539, 50, unit="user")), 1_000_000)
    assert {release.sampling for _, release in same.releases} == {FixedSizeSampling(1_000_000, 50, unit="user")}
    assert same.releases[0][1].queries == ledger_of(FixedSizeSampling(539, 50)).releases[0][1].queries


def test_lots_that_do_not_fit() -> None:
    run = ledger_of(PoissonSampling(539, 50 / 539, unit="user"))
    for population, size in ((10, None), (1_000, 2_000), (0, None), (1_000, 0)):
        with pytest.raises(ConfigurationError, match="users cannot be drawn from a population"):
            at_population(run, population, size)
    with pytest.raises(ConfigurationError, match="needs poisson or fixed_size batches"):
        at_population(ledger_of(TruncatedPoissonSampling(539, 0.1, max_batch_size=60)), 1_000)


def test_it_is_called_nominal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_result(tmp_path)
    account = ["account", str(tmp_path)]
    assert main([*account, "--population", "1e6", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["population"] == 1_000_000 and facts["nominal_population"] and not facts["guarantee"]
    assert main([*account, "--population", "1000000", "--batch-size", "5000"]) == 0
    shown = capsys.readouterr().out
    assert "1000000   nominal: not the number of the runs" in shown and "5000 examples, sampling rate 0.005" in shown
    assert main([*account, "--batch-size", "50"]) == 1
    assert "--batch-size requires --population" in capsys.readouterr().err


def test_another_population_is_not_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_result(tmp_path)
    words = ["--population", "1000000", "--batch-size", "5000", "--epsilon", "2", "--delta", "1e-7"]
    assert main(["calibrate", "--continue-from", str(tmp_path), *words]) == 1
    assert "population 1000" in capsys.readouterr().err


def test_a_ledger_that_states_its_plan() -> None:
    """The plan is of the lots that were drawn: a ledger over another population has none."""
    drawn = read_ledger(FOLDER / "plan.jsonl")
    assert drawn.header.plan is not None
    assert at_population(drawn, 10 * drawn.header.population).header.plan is None
