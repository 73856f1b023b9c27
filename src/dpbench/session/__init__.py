"""The order of a private step, whoever drives it."""
