"""Audits by labels: of simulated mechanisms, correct and broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpbench.capabilities.auditing.audit import Verdict
from dpbench.capabilities.auditing.family import Family
from dpbench.capabilities.auditing.labels import LabelScores, audit_labels
from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling
from tests.capabilities.auditing.worlds import NOISE, World, ledger_of

RECORDS = 1000
POISSON = PoissonSampling(RECORDS, 0.05)  # of records that are all canaries
WORLD = World(z=NOISE[4], releases=100, canaries=round(2.3 * RECORDS))


def scores(world: World = WORLD, seed: int = 0) -> LabelScores:
    """The best scores that there are: log-likelihood ratios of all that is released, far more than labels tell.

    1,000 members and as many others: more coins are flipped than are needed.
    """
    seen = world.scores(seed)
    members, others = seen.llr[seen.member][:RECORDS], seen.llr[~seen.member][:RECORDS]
    assert len(members) == len(others) == RECORDS
    return LabelScores(members, others, 0.5, 0.1)


@pytest.mark.long
@pytest.mark.parametrize("epsilon", [1, 4, 10])
def test_no_more_correct_runs_are_flagged_than_may_be(epsilon: int) -> None:
    world = replace(WORLD, z=NOISE[epsilon])
    ledger = ledger_of(world, POISSON)
    family = Family(ledger.events, ledger.header.delta)
    limits = [audit_labels(ledger, scores(world, seed), family=family).audited or 0.0 for seed in range(25)]
    assert 0.5 * epsilon < np.mean(limits) < epsilon  # sharp where scores are good
    assert sum(limit > epsilon for limit in limits) <= 3  # of 25 at 5 %: 4 or more has p = 0.03


def test_half_the_noise_is_a_violation() -> None:
    result = audit_labels(ledger_of(WORLD, POISSON), scores(replace(WORLD, noise=0.5)))
    assert result.verdict == Verdict.VIOLATED and result.violations[0].name == "labels, family"
    facts = result.to_json()
    assert facts["by"] == "labels" and facts["verdict"] == "VIOLATED" and facts["audited"] > 4


def test_chance_shows_nothing() -> None:
    rng = np.random.default_rng(0)
    chance = LabelScores(rng.normal(size=RECORDS), rng.normal(size=300), 0.1, 0.1)
    result = audit_labels(ledger_of(WORLD, POISSON), chance)
    assert result.verdict == Verdict.CONSISTENT and result.audited is not None and result.audited < 0.2


@pytest.mark.parametrize(
    ("members", "others", "words"),
    [
        (RECORDS, 19, "19 training or test images are too few"),
        (RECORDS - 1, RECORDS, "on 1000 records, and the data set contains 999"),
        (RECORDS, RECORDS, "fixed_size batches have none: train with canaries"),
    ],
)
def test_bad_input_is_one_line(members: int, others: int, words: str) -> None:
    ledger = ledger_of(WORLD, FixedSizeSampling(RECORDS, 50))
    with pytest.raises(ConfigurationError, match=words):
        audit_labels(ledger, LabelScores(np.ones(members), np.ones(others), 0, 0))
