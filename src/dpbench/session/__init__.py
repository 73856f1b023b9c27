"""A private training below Lightning: the order of its steps, whoever drives it."""
