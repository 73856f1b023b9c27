"""Audits by labels: of simulated mechanisms, correct and broken."""

from __future__ import annotations

import numpy as np
import pytest

from dpbench.capabilities.auditing.audit import Verdict
from dpbench.capabilities.auditing.family import Family
from dpbench.capabilities.auditing.labels import LabelScores, audit_labels
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import Header, Ledger
from dpbench.privacy.sampling import FixedSizeSampling
from tests.capabilities.auditing.worlds import NOISE, World, ledger_of

RECORDS = 1000


def ledger(epsilon: int) -> Ledger:
    """Of 1,000 records, which are all canaries."""
    made = ledger_of(World(z=NOISE[epsilon], releases=100))
    facts = made.header
    return Ledger([Header(facts.unit, facts.neighboring_relation, RECORDS, facts.delta)], made.releases)


def scores(epsilon: int, seed: int, noise: float = 1.0) -> LabelScores:
    """The best scores that there are: log-likelihood ratios of all that is released, far more than labels tell.

    1,000 members and as many others: more coins are flipped than are needed.
    """
    seen = World(z=NOISE[epsilon], releases=100, canaries=round(2.3 * RECORDS), noise=noise).scores(seed)
    members, others = seen.llr[seen.member][:RECORDS], seen.llr[~seen.member][:RECORDS]
    assert len(members) == len(others) == RECORDS
    return LabelScores(members, others, 0.5, 0.1)


@pytest.mark.long
@pytest.mark.parametrize("epsilon", [1, 4, 10])
def test_no_more_correct_runs_are_flagged_than_may_be(epsilon: int) -> None:
    book = ledger(epsilon)
    family = Family(book.events, book.header.delta)
    found = [audit_labels(book, scores(epsilon, seed), family=family) for seed in range(25)]
    assert sum(one.verdict == Verdict.VIOLATED for one in found) <= 3  # of 25 at 5 %: 4 or more has p = 0.03
    limits = [one.audited or 0.0 for one in found]
    assert 0.5 * epsilon < np.mean(limits) < epsilon  # sharp where scores are good
    assert sum(limit > epsilon for limit in limits) <= 3


@pytest.mark.parametrize("epsilon", [4, 10])
def test_half_the_noise_is_a_violation(epsilon: int) -> None:
    book = ledger(epsilon)
    result = audit_labels(book, scores(epsilon, 0, noise=0.5))
    assert result.verdict == Verdict.VIOLATED and result.violations[0].name == "labels, family"
    facts = result.to_json()
    assert facts["by"] == "labels" and facts["verdict"] == "VIOLATED" and facts["audited"] > epsilon


def test_chance_shows_nothing() -> None:
    rng = np.random.default_rng(0)
    result = audit_labels(ledger(4), LabelScores(rng.normal(size=RECORDS), rng.normal(size=300), 0.1, 0.1))
    assert result.verdict == Verdict.CONSISTENT and result.audited is not None and result.audited < 0.2
    assert (result.members, result.others) == (RECORDS, 300)


@pytest.mark.parametrize(
    ("members", "others", "confidence", "words"),
    [
        (RECORDS, 19, 0.95, "19 training or test images are too few"),
        (RECORDS - 1, RECORDS, 0.95, "of 1000 records and the data set holds 999"),
        (RECORDS, RECORDS, 1.0, "confidence must lie strictly between 0 and 1"),
    ],
)
def test_bad_input_is_one_line(members: int, others: int, confidence: float, words: str) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigurationError, match=words):
        audit_labels(ledger(4), LabelScores(rng.normal(size=members), rng.normal(size=others), 0, 0), confidence)


def test_fixed_size_lots_are_refused() -> None:
    book = ledger_of(World(z=1.0, releases=20), FixedSizeSampling(RECORDS, 50))
    with pytest.raises(ConfigurationError, match="fixed_size batches have none: audit by canaries"):
        audit_labels(book, scores(4, 2))
