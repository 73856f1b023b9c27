"""Accountants against each other, closed forms, other libraries, and their own inverses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon, ledger_epsilon
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import Event, SumQuery, effective_noise_multiplier
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling, ShuffledEpochs

DELTA = 1e-5


def event(z: float, q: float = 1.0, population: int = 60_000) -> Event:
    return Event(PoissonSampling(population, q), (SumQuery("all", 1.0, z),))


@settings(max_examples=10, deadline=None)
@given(z=st.floats(0.7, 3), q=st.floats(1e-3, 0.05), steps=st.integers(100, 3000), factor=st.floats(1.1, 2))
def test_monotone(z: float, q: float, steps: int, factor: float) -> None:
    base = epsilon({event(z, q): steps}, DELTA)
    assert epsilon({event(z * factor, q): steps}, DELTA) < base
    assert epsilon({event(z, q * factor): steps}, DELTA) > base
    assert epsilon({event(z, q): int(steps * factor) + 1}, DELTA) > base
    assert epsilon({event(z, q): steps}, DELTA / factor) > base


def test_figures_of_the_papers_setting() -> None:
    """MNIST, z = 1.1, batch 256, 8,000 steps: 1.92 by RDP, 1.76 by PLD (shared design, recomputed)."""
    run = {event(1.1, 256 / 60_000): 8000}
    assert epsilon(run, DELTA, "rdp") == pytest.approx(1.92, abs=0.005)
    assert epsilon(run, DELTA, "pld") == pytest.approx(1.754, abs=0.005)


def test_opacus_agrees() -> None:
    from opacus.accountants import RDPAccountant

    theirs = RDPAccountant()
    theirs.history = [(1.1, 256 / 60_000, 8000)]
    assert epsilon({event(1.1, 256 / 60_000): 8000}, DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)


def test_order_and_grouping_do_not_matter() -> None:
    a, b = event(1.0, 0.01), event(2.0, 0.02)
    both = epsilon({a: 10, b: 20}, DELTA)
    assert both == pytest.approx(epsilon({b: 20, a: 10}, DELTA))
    assert both > max(epsilon({a: 10}, DELTA), epsilon({b: 20}, DELTA))
    assert epsilon({}, DELTA) == epsilon({a: 0}, DELTA) == 0


def test_groups_cost_what_one_vector_costs() -> None:
    """Section 2.2 of general_approach_2018: z = (Σ (S_g/σ_g)²)^(-1/2); here four groups at C/2 with noise z·C."""
    queries = tuple(SumQuery(str(g), 0.5, 1.3) for g in range(4))
    assert effective_noise_multiplier(queries) == pytest.approx(1.3)
    sampling = PoissonSampling(1000, 0.01)
    assert epsilon({Event(sampling, queries): 100}, DELTA) == pytest.approx(
        epsilon({event(1.3, 0.01, 1000): 100}, DELTA)
    )


def test_fixed_size_lots_use_replace_one() -> None:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    sampling = FixedSizeSampling(1000, 50)
    ours = epsilon({Event(sampling, (SumQuery("all", 2.0, 4.0),)): 20}, DELTA)
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, gaussian), 20)
    assert ours == pytest.approx(accountant.get_epsilon(DELTA))
    with pytest.raises(ConfigurationError, match="pld accountant does not cover 'fixed_size'"):
        epsilon({Event(sampling, (SumQuery("all", 2.0, 4.0),)): 20}, DELTA, "pld")


def test_clear_errors() -> None:
    run = {event(1.0): 1}
    with pytest.raises(ConfigurationError, match="unknown accountant 'magic'; known are rdp, pld"):
        epsilon(run, DELTA, "magic")
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ConfigurationError, match="delta"):
            epsilon(run, delta)
    with pytest.raises(ConfigurationError, match="no accountant covers 'shuffled_epochs'"):
        epsilon({Event(ShuffledEpochs(10, 2), (SumQuery("all", 1.0, 1.0),)): 1}, DELTA)


def test_an_independent_accountant_reads_the_ledger(tmp_path: Path) -> None:
    """From the file alone, with Opacus' accountant, the same epsilon as ours."""
    import json

    from opacus.accountants import RDPAccountant

    writer = LedgerWriter(tmp_path / "l", Header("example", "add_or_remove_one", 1000, DELTA))
    sampling = PoissonSampling(1000, 0.02)
    for number in range(100):
        queries = (SumQuery("a", 0.6, 1.5 if number < 50 else 2.0), SumQuery("b", 0.8, 1.5))
        writer.append(Release(number, sampling, queries))
    writer.close()
    theirs = RDPAccountant()
    for line in (tmp_path / "l").read_text().splitlines()[1:]:
        data = json.loads(line)
        z = sum((q["sensitivity"] / q["noise_std"]) ** 2 for q in data["queries"]) ** -0.5
        theirs.step(noise_multiplier=z, sample_rate=data["sampling"]["sample_rate"])
    ours = ledger_epsilon(read_ledger(tmp_path / "l"), DELTA)
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)
