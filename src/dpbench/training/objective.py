"""What a sweeper may choose by: never test data, and never what private training data gave without noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpbench.errors import ConfigurationError

_CHOOSABLE = ("val/", "private/", "privacy/")
_BASIC = "BasicSweeper"  # Hydra's own: it runs every combination and chooses nothing


def optimises(hydra: Any) -> bool:
    """Whether a sweep's own configuration (`hydra`) has a sweeper that chooses by what a run returns."""
    return not str(hydra["sweeper"]["_target_"]).endswith(_BASIC)


def objective_of(config: Mapping[str, Any]) -> str | None:
    """The metric by which a run may be chosen; None where there is none that a choice may look at.

    Args:
        config: Resolved configuration of a run.

    Raises:
        ConfigurationError: The objective that was asked for is measured on test data, on training data without noise,
            or on data that are not held out.
    """
    wanted, held_out = config.get("objective"), bool(config["data"].get("val_size"))
    if wanted is None:
        classifies = str(config.get("module", {}).get("_target_", "")).rpartition(".")[2] != "GAN"
        return "val/accuracy" if held_out and classifies else None
    if not wanted.startswith(_CHOOSABLE):
        raise ConfigurationError(
            f"objective={wanted} cannot be optimised: choices are made on records held out (val/..., with "
            "data.val_size) or on what the budget covers (private/...), not on test data or noiseless training data."
        )
    if wanted.startswith("val/") and not held_out:
        raise ConfigurationError(f"objective={wanted} needs records held out: set data.val_size, such as 1000.")
    return str(wanted)


def refuse_choice(config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError where a sweeper that optimises would have nothing to choose by but test data."""
    if objective_of(config) is None:
        raise ConfigurationError(
            "this sweeper chooses by what a run returns, and only test data are there to measure it: hold records out "
            "with data.val_size=1000, say (objective: val/accuracy), or name an objective=val/... or private/..."
        )


def value_of(record: Mapping[str, Any], config: Mapping[str, Any], chosen: bool) -> float | None:
    """What a run returns to its sweeper.

    Args:
        record: The run's.
        config: Its configuration.
        chosen: Whether the sweeper optimises.

    Raises:
        ConfigurationError: The objective was not measured.
    """
    metrics, name = record["metrics"], objective_of(config)
    if name is None and chosen:
        refuse_choice(config)
    name = name or "test/accuracy"
    value = metrics.get(name)
    if value is None and chosen:
        measured = ", ".join(key for key in metrics if key.startswith(_CHOOSABLE)) or "none"
        why = "is not finite" if name in metrics else "was not measured"
        raise ConfigurationError(f"objective={name} {why}; a choice may look at: {measured}.")
    return None if value is None else float(value)
