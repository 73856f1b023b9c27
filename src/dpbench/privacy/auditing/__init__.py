"""What an auditor saw of a run's canaries, and the bounds on epsilon and the checks of the declaration that follow."""

from dpbench.privacy.auditing.audit import AuditResult, Bound, Check, Verdict, audit
from dpbench.privacy.auditing.declared import ReleaseGame, participation, release_game
from dpbench.privacy.auditing.family import Family, TradeOff
from dpbench.privacy.auditing.independent import (
    auc,
    auc_lower,
    clopper_pearson_lower,
    clopper_pearson_upper,
    two_rates,
)
from dpbench.privacy.auditing.one_run import Guesses, count_right, one_run, one_run_fdp, one_run_p_value
from dpbench.privacy.auditing.scores import Scores, ScoreSums

__all__ = [
    "AuditResult",
    "Bound",
    "Check",
    "Family",
    "Guesses",
    "ReleaseGame",
    "ScoreSums",
    "Scores",
    "TradeOff",
    "Verdict",
    "auc",
    "auc_lower",
    "audit",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "count_right",
    "one_run",
    "one_run_fdp",
    "one_run_p_value",
    "participation",
    "release_game",
    "two_rates",
]
