"""Lower bounds on ε, and checks of the declared mechanism, from the canaries of a run."""

from dpbench.capabilities.auditing.audit import Audit, AuditResult, Bound, Check, Verdict, audit
from dpbench.capabilities.auditing.declared import ReleaseGame, participation, release_game
from dpbench.capabilities.auditing.family import Family
from dpbench.capabilities.auditing.independent import (
    auc,
    auc_lower,
    clopper_pearson_lower,
    clopper_pearson_upper,
)
from dpbench.capabilities.auditing.labels import LabelAudit, audit_labels
from dpbench.capabilities.auditing.one_run import Guesses, count_right, one_run, one_run_fdp, one_run_p_value
from dpbench.privacy.accounting.tradeoff import TradeOff

__all__ = [
    "Audit",
    "AuditResult",
    "Bound",
    "Check",
    "Family",
    "Guesses",
    "LabelAudit",
    "ReleaseGame",
    "TradeOff",
    "Verdict",
    "auc",
    "auc_lower",
    "audit",
    "audit_labels",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "count_right",
    "one_run",
    "one_run_fdp",
    "one_run_p_value",
    "participation",
    "release_game",
]
