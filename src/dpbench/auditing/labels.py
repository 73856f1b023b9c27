"""An audit by labels: a training on noise is refuted by how well its final weights know the random labels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpbench.auditing.audit import Bound, Bounded, Levels, bound_by_area, claimed_epsilon
from dpbench.auditing.family import Family
from dpbench.auditing.independent import auc
from dpbench.auditing.one_run import largest_refuted, one_run_p_value
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import Ledger
from dpbench.privacy.canaries.labels import LabelScores

TESTS = 2  # bounds share the probability of an error
_GUESSED = 0.3  # share of the pairs on which a guess is made: fixed, so that no scores are looked at
_FEWEST = 20  # members, and others, below which no bound says anything
_MOST = 700.0  # exponents beyond overflow


@dataclass(frozen=True)
class LabelAudit(Bounded):
    """What the final weights of one run on noise tell of its ε.

    Attributes:
        claimed: ε of the ledger by RDP; nominal where it does not cover the lots.
        sound: The tightest ε that covers the lots; None where none does.
        sound_by: The accountant that gives it.
        delta: δ of all.
        members: Training records.
        others: Images that nobody trained on.
        releases: How many.
        confidence: Of each bound by itself, and of the verdict on both (Bonferroni).
        auc: Probability that a training record scores higher than another image.
        recalled: Share of training records whose label has the largest logit.
        guessed: The same of the others.
        bounds: Lower limits of ε.
    """

    claimed: float
    sound: float | None
    sound_by: str | None
    delta: float
    members: int
    others: int
    releases: int
    confidence: float
    auc: float
    recalled: float
    guessed: float
    bounds: tuple[Bound, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is infinite is None."""
        return {"by": "labels", **super().to_json()}


def audit_labels(
    ledger: Ledger, scores: LabelScores, confidence: float = 0.95, family: Family | None = None
) -> LabelAudit:
    """Compare what final weights know of random labels with what the run's ledger claims.

    Two bounds:
      - Labels, family: the area under the ROC curve (DeLong's limit) against the most that each member of the family
        (the ledger's releases with all noise scaled by one factor) allows. It takes records for independent
        observations, and a fresh image to score as if one training record less had been there.
      - Labels, DP only: records and other images are drawn alike, so of a pair of one each it is a fair coin of its
        own which of them was trained on, whatever the other pairs are. With guesses by the larger score the theorem of
        Steinke, Nasr & Jagielski (2023, 5.2) holds as it stands for (ε', δ')-DP where one record is replaced; where
        one is added or removed, ε' = 2ε and δ' = (1 + e^ε)·δ. (For the records themselves it does not hold: that
        exactly so many are members is no independent coin for each.)

    Args:
        ledger: Of the run; its unit must be an example.
        scores: By its final weights.
        confidence: Probability that a bound is none too high, and that the verdict on a correct run is no accusation,
            if what they assume is true.
        family: Of the ledger's releases, where several runs of equal cost are audited; made here by default.

    Raises:
        ConfigurationError: The confidence is out of range, the ledger is of other records, or there are too few.
    """
    levels = Levels.of(confidence, TESTS)
    header = ledger.header
    few = min(len(scores.members), len(scores.others))
    trained_on = len(scores.members) + scores.left_out
    if header.population != trained_on or not ledger.releases:
        raise ConfigurationError(
            f"the ledger is of {len(ledger.releases)} releases of {header.population} records and the data set holds "
            f"{trained_on}: they are not of one run."
        )
    if few < _FEWEST:
        raise ConfigurationError(f"{few} training or test images are too few for an audit: make {_FEWEST} or more.")
    if family is None:
        family = Family(ledger.events, header.delta)
    values = np.concatenate([scores.members, scores.others])
    member = np.arange(len(values)) < len(scores.members)
    # Two runs on a pair of records differ by one replacement, or by one record added and one removed.
    changes = 1 if header.neighboring_relation == "replace_one" else 2
    return LabelAudit(
        claimed=claimed_epsilon(ledger),
        sound=family.sound,
        sound_by=family.accountant,
        delta=header.delta,
        members=len(scores.members),
        others=len(scores.others),
        releases=len(ledger.releases),
        confidence=confidence,
        auc=auc(values, member)[0],
        recalled=scores.recalled,
        guessed=scores.guessed,
        bounds=(
            bound_by_area("labels, family", "the family, independent records", values, member, family, levels),
            _bound_by_pairs(scores, family, levels, changes),
        ),
    )


def _bound_by_pairs(scores: LabelScores, family: Family, levels: Levels, changes: int) -> Bound:
    """The bound "labels, DP only" of `audit_labels`.

    Args:
        scores: By final weights.
        family: Of the ledger's releases.
        levels: Probabilities of an error.
        changes: Of one record each, by which the two data sets of a pair differ.
    """
    pairs = min(len(scores.members), len(scores.others))
    lead = scores.members[:pairs] - scores.others[:pairs]
    guesses = max(1, round(_GUESSED * pairs))
    surest = np.argsort(-np.abs(lead), kind="stable")[:guesses]
    right = int((lead[surest] > 0).sum())

    def p_value(epsilon: float) -> float:
        if changes * epsilon > _MOST:
            return 1.0
        # Group privacy: δ' = δ·(1 + e^ε) of two changes, δ of one.
        delta = family.delta * sum(math.exp(number * epsilon) for number in range(changes))
        return one_run_p_value(pairs, guesses, right, changes * epsilon, delta)

    return Bound(
        name="labels, DP only",
        assumes="nothing but (ε, δ)-DP",
        epsilon=largest_refuted(lambda epsilon: p_value(epsilon) < levels.alone),
        violated=family.accountant is not None and p_value(family.claimed) < levels.joint,
    )
