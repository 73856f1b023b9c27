"""An audit by labels: a training on noise is refuted by how well its final weights know the random labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpbench.capabilities.auditing.audit import Audit, Levels, bound_by_area, claimed_epsilon
from dpbench.capabilities.auditing.family import Family
from dpbench.capabilities.auditing.independent import auc
from dpbench.capabilities.canaries.scores import Floats
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import Ledger

_FEWEST = 20  # members, and others, below which the bound says nothing


@dataclass(frozen=True, eq=False)
class LabelScores:
    """Logits of labels by the final weights of a training on noise.

    Attributes:
        members: (n,) for each training record by how much the logit of its label exceeds those of all others together.
        others: (k,) the same for noise that was not trained on.
        recalled: Share of the training records with the largest logit at their label.
        guessed: The same of the others: chance.
        left_out: How many more records were trained on, such as copies of inserted ones, which are no canaries.
    """

    members: Floats
    others: Floats
    recalled: float
    guessed: float
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class LabelAudit(Audit):
    """Audit of one run on noise by its final weights.

    Its members are the training records, and it has one bound: none where ε is too large for trade-off curves.

    Attributes:
        others: Images that were not trained on.
        auc: Probability that a training record scores higher than another image.
        recalled: Share of training records with the largest logit at their label.
        guessed: The same of the others.
        by: Name for JSON.
    """

    others: int
    auc: float
    recalled: float
    guessed: float
    by: str = "labels"


def audit_labels(
    ledger: Ledger, scores: LabelScores, confidence: float = 0.95, family: Family | None = None
) -> LabelAudit:
    """Compare the final weights' knowledge of random labels with the claim of the run's ledger.

    The area under the ROC curve (DeLong's limit) is compared with the most that each member of the family (the ledger's
    releases with all noise scaled by one factor) allows. This takes records for independent observations, and a fresh
    image to score as if one training record less had been there.

    Args:
        ledger: Ledger of the run; its unit must be an example.
        scores: Scores by its final weights.
        confidence: Probability that the bound is none too high, if its assumption holds.
        family: Family of the ledger's releases, where several runs of equal cost are audited; made here by default.

    Raises:
        ConfigurationError: The confidence is out of range, the ledger is of other records, there are too few, or its
            batches have no trade-off curve.
    """
    levels = Levels.of(confidence, tests=1)
    header = ledger.header
    few = min(len(scores.members), len(scores.others))
    trained_on = len(scores.members) + scores.left_out
    if header.population != trained_on or not ledger.releases:
        raise ConfigurationError(
            f"the ledger has {len(ledger.releases)} releases on {header.population} records, and the data set contains "
            f"{trained_on}: they are not from the same run."
        )
    if few < _FEWEST:
        raise ConfigurationError(f"{few} training or test images are too few for an audit: make {_FEWEST} or more.")
    if family is None:
        family = Family(ledger.events, header.delta)
    uncovered = family.kinds_not_covered("pld")
    if uncovered:
        raise ConfigurationError(
            f"labels are compared with a trade-off curve, and {uncovered[0]} batches have none: train with canaries "
            "(audit=gradient_canaries) or with data.sampling=poisson."
        )
    values = np.concatenate([scores.members, scores.others])
    member = np.arange(len(values)) < len(scores.members)
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
        bounds=(bound_by_area("labels, family", "the family, independent records", values, member, family, levels),),
    )
