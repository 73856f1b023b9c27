"""The ledger of releases and its cost: accountants, ε, noise for a budget.

Nothing is imported here: who reads a ledger need not wait for the accountants.
"""
