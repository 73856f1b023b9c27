"""Lower bounds for canaries that are independent observations."""

from __future__ import annotations

import math

from scipy import special, stats

from dpbench.capabilities.auditing.levels import check_level
from dpbench.capabilities.canaries.scores import Flags, Floats

_FEW = 10  # errors below which the normal approximation of an AUC is not trusted


def clopper_pearson_upper(count: float, trials: int, level: float) -> float:
    """Upper limit of a probability from `count` events in `trials` independent trials (Clopper & Pearson 1934).

    Raises:
        ConfigurationError: The level is out of range.

    >>> round(clopper_pearson_upper(0, 100, 0.05), 4)
    0.0295
    """
    check_level(level)
    if count >= trials:
        return 1.0
    return float(stats.beta.ppf(1 - level, count + 1, trials - count))


def clopper_pearson_lower(count: float, trials: int, level: float) -> float:
    """Lower limit of a probability, see `clopper_pearson_upper`.

    >>> round(clopper_pearson_lower(100, 100, 0.05), 4)
    0.9705
    """
    check_level(level)
    if count <= 0:
        return 0.0
    return float(stats.beta.ppf(level, count, trials - count + 1))


def auc(scores: Floats, member: Flags) -> tuple[float, float]:
    """Area under the ROC curve, and its standard error (DeLong, DeLong & Clarke-Pearson 1988).

    Assumes: canaries that are independent observations; at least two members and two others.

    >>> import numpy as np
    >>> value, error = auc(np.array([0.0, 1.0, 2.0, 3.0]), np.array([False, True, False, True]))
    >>> value, round(error, 3)
    (0.75, 0.354)
    """
    inside = scores[member]
    outside = scores[~member]
    ranks = stats.rankdata(scores)
    # DeLong's placements: the share of the others below each member, and of the members above each other.
    others_below = ranks[member] - stats.rankdata(inside)
    members_below = ranks[~member] - stats.rankdata(outside)
    of_members = others_below / len(outside)
    of_others = 1 - members_below / len(inside)
    # DeLong's variance of the area: that of both kinds of placements, each over its number.
    variance = of_members.var(ddof=1) / len(inside)
    variance += of_others.var(ddof=1) / len(outside)
    return float(of_members.mean()), math.sqrt(variance)


def auc_lower(scores: Floats, member: Flags, level: float) -> float:
    """Lower limit of the area under the ROC curve, on the scale of its logit; see `auc`.

    Where errors are so few that DeLong's variance means nothing, the lesser of it and the Clopper-Pearson limit of as
    many disjoint pairs as there are.

    Args:
        scores: (m,) higher for likelier members.
        member: (m,) the truth.
        level: Probability of a limit above the truth.

    Raises:
        ConfigurationError: The level is out of range.

    >>> import numpy as np
    >>> auc_lower(np.arange(200.0), np.arange(200) >= 100, level=0.05) < 0.975  # perfect, but of 100 pairs only
    True
    """
    check_level(level)
    pairs = int(min(member.sum(), (~member).sum()))
    if pairs < 2:
        return 0.0
    value, error = auc(scores, member)
    if value <= 0:
        return 0.0
    limit = 1.0
    if value < 1:
        # By the delta method the logit's error is that of the area over A(1 − A); its limit stays within (0, 1).
        logit_error = error / (value * (1 - value))
        lower_logit = special.logit(value) - stats.norm.isf(level) * logit_error
        limit = float(special.expit(lower_logit))
    wrong = pairs * (1 - value)
    if wrong < _FEW:
        limit = min(limit, clopper_pearson_lower(pairs - wrong, pairs, level))
    return limit
