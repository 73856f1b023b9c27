"""The ledger of releases, and what they cost: accountants, epsilons, noise for a budget."""

from dpbench.privacy.accounting.accountants import ACCOUNTANTS, Accountant
from dpbench.privacy.accounting.calibration import calibrate_noise_multiplier, remaining_releases
from dpbench.privacy.accounting.composition import epsilon, find_accountant, ledger_epsilon
from dpbench.privacy.accounting.ledger import Header, Ledger, Release, read_ledger
from dpbench.privacy.accounting.writer import LedgerWriter

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Header",
    "Ledger",
    "LedgerWriter",
    "Release",
    "calibrate_noise_multiplier",
    "epsilon",
    "find_accountant",
    "ledger_epsilon",
    "read_ledger",
    "remaining_releases",
]
