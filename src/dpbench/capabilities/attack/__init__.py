"""Membership inference over the runs of a sweep: the members that an attacker recognizes, against the most ε allows."""
