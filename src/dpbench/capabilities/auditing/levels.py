"""Checks of probabilities of an error, and of δ, that functions of audits are given."""

from __future__ import annotations

from dpbench.errors import ConfigurationError


def check_level(level: float, name: str = "level") -> None:
    """Check a probability of an error, or a confidence.

    Args:
        level: Probability, such as 0.05.
        name: Name of the argument.

    Raises:
        ConfigurationError: It does not lie strictly between 0 and 1.

    >>> check_level(0.05)
    """
    if not 0 < level < 1:
        raise ConfigurationError(f"{name} must lie strictly between 0 and 1, not {level}.")


def check_delta(delta: float) -> None:
    """Check δ of a claim that a bound is computed for; unlike a training, a claim may have δ = 0.

    Args:
        delta: δ.

    Raises:
        ConfigurationError: It is negative, or not below 1.

    >>> check_delta(0)
    """
    if not 0 <= delta < 1:
        raise ConfigurationError(f"delta must be at least 0 and below 1, not {delta}.")
