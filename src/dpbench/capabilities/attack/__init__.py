"""Membership inference over the runs of a sweep: what an attacker recognizes, beside what ε allows at most."""
