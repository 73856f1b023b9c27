"""The ledger of releases, and what they cost: accountants, epsilons, noise for a budget.

Nothing is imported here: who reads a ledger need not wait for the accountants.
"""
