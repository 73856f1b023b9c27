"""Objectives of sweepers: never test data, and never figures of private training data without noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from hydra.utils import get_class

from dpbench.errors import ConfigurationError

_CHOOSABLE = ("val/", "private/", "privacy/")
_BASIC = "BasicSweeper"  # Hydra's own: it runs every combination and chooses nothing


def optimizes(hydra: Any) -> bool:
    """Tell whether the sweeper of Hydra's configuration chooses by the values that runs return."""
    return not str(hydra["sweeper"]["_target_"]).endswith(_BASIC)


def objective_of(config: Mapping[str, Any]) -> str | None:
    """The metric by which a run may be chosen; None where there is none that a choice may look at.

    Without one that is asked for it is the module's own (its attribute `objective`), where records are held out: those
    of `data.val_size` or `data.val_users`, or of the `val_dataloader` of data without that option.

    Args:
        config: Resolved configuration of a run, whose classes can be imported.

    Raises:
        ConfigurationError: The objective that was asked for is measured on test data, on training data without noise,
            or on data that are not held out.
    """
    name: str | None = config.get("objective")
    held_out = _holds_out(config["data"])
    if name is None:
        default: str | None = getattr(get_class(config["module"]["_target_"]), "objective", None)
        return default if held_out else None
    if not name.startswith(_CHOOSABLE):
        raise ConfigurationError(
            f"objective={name} cannot be optimized: choices are made on records held out (val/..., with "
            "data.val_size; data by users: data.val_users) or on what the budget covers (private/...), not on test "
            "data or noiseless training data."
        )
    if name.startswith("val/") and not held_out:
        raise ConfigurationError(
            f"objective={name} needs records held out: set data.val_size, such as 1000 (data by users: data.val_users)."
        )
    return name


def _holds_out(data: Mapping[str, Any]) -> bool:
    for option in ("val_size", "val_users"):
        if option in data:
            return bool(data[option])
    loader = getattr(get_class(data["_target_"]), "val_dataloader", None)
    return loader is not pl.LightningDataModule.val_dataloader


def refuse_choice(config: Mapping[str, Any], direction: str | None = None) -> None:
    """Refuse a choice that a sweeper which optimizes should not make.

    Args:
        config: Resolved configuration of a run.
        direction: "minimize" or "maximize", where the sweeper's configuration says it.

    Raises:
        ConfigurationError: There is nothing to choose by but test data, or the least accurate run would be chosen.
    """
    if direction not in ("minimize", "maximize", None):
        raise ConfigurationError(f"hydra.sweeper.direction must be minimize or maximize, not {direction!r}.")
    name = objective_of(config)
    if name is not None and name.endswith("/accuracy") and direction == "minimize":
        raise ConfigurationError(f"the sweeper would choose the least {name}: hydra.sweeper.direction=maximize.")
    if name is None:
        raise ConfigurationError(
            "this sweeper chooses by what a run returns, and only test data are there to measure it: hold records out "
            "with data.val_size=1000, say (users with data.val_users; objective: val/accuracy), or name an "
            "objective=val/... or private/..."
        )


def value_of(record: Mapping[str, Any], config: Mapping[str, Any], chosen: bool) -> float | None:
    """Value that a run returns to its sweeper: that of its objective; nothing where it has none.

    Args:
        record: The run's.
        config: Its configuration.
        chosen: Whether the sweeper optimizes.

    Raises:
        ConfigurationError: The sweeper optimizes, and there is no objective, or it was not measured.
    """
    if chosen:
        refuse_choice(config)
    metrics = record["metrics"]
    name = objective_of(config)
    value = None if name is None else metrics.get(name)
    if value is None and chosen:
        measured = ", ".join(key for key in metrics if key.startswith(_CHOOSABLE)) or "none"
        why = "is not finite" if name in metrics else "was not measured"
        raise ConfigurationError(f"objective={name} {why}; a choice may look at: {measured}.")
    return None if value is None else float(value)
