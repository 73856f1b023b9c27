"""The ledger of releases and its cost: accountants, ε, noise for a budget.

Nothing is imported here, so that reading a ledger does not load the accountants.
"""
