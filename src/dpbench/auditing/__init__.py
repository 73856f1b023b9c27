"""Lower bounds on ε, and checks of the declared mechanism, from the canaries of a run; membership inference."""

from dpbench.auditing.audit import AuditResult, Bound, Check, Verdict, audit
from dpbench.auditing.declared import ReleaseGame, participation, release_game
from dpbench.auditing.family import Family
from dpbench.auditing.independent import (
    auc,
    auc_lower,
    clopper_pearson_lower,
    clopper_pearson_upper,
    two_rates,
)
from dpbench.auditing.labels import LabelAudit, audit_labels
from dpbench.auditing.membership import (
    ATTACKS,
    AttackResult,
    ClaimTest,
    Estimate,
    MembershipGame,
    Roc,
    choose_attack_guesses,
    claim_groups,
    claim_test,
    lira_offline,
    lira_online,
    log_odds,
    loss_threshold,
    measure_attack,
    rmia,
    rmia_offline,
    roc,
)
from dpbench.auditing.one_run import Guesses, count_right, one_run, one_run_fdp, one_run_p_value
from dpbench.privacy.accounting.tradeoff import TradeOff

__all__ = [
    "ATTACKS",
    "AttackResult",
    "AuditResult",
    "Bound",
    "Check",
    "ClaimTest",
    "Estimate",
    "Family",
    "Guesses",
    "LabelAudit",
    "MembershipGame",
    "ReleaseGame",
    "Roc",
    "TradeOff",
    "Verdict",
    "auc",
    "auc_lower",
    "audit",
    "audit_labels",
    "choose_attack_guesses",
    "claim_groups",
    "claim_test",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "count_right",
    "lira_offline",
    "lira_online",
    "log_odds",
    "loss_threshold",
    "measure_attack",
    "one_run",
    "one_run_fdp",
    "one_run_p_value",
    "participation",
    "release_game",
    "rmia",
    "rmia_offline",
    "roc",
    "two_rates",
]
