"""Objectives of sweepers: never test data, and never figures of private training data without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from hydra.utils import get_class

from dpbench.errors import ConfigurationError

_CHOOSABLE = ("val/", "private/", "privacy/")


def objectives_of(config: Mapping[str, Any]) -> list[str]:
    """The metrics by which a run may be chosen; none where there is none that a choice may look at.

    Without one that is asked for it is the module's own (its attribute `objective`), where records are held out: those
    of `data.val_size` or `data.val_users`, or of the `val_dataloader` of data without that option.

    Args:
        config: Resolved configuration of a run with classes that can be imported.

    Raises:
        ConfigurationError: An objective that was asked for is measured on test data, on training data without noise,
            or on data that are not held out.
    """
    asked = config.get("objective")
    names: list[str] = [asked] if isinstance(asked, str) else asked or []
    held_out = _holds_out(config["data"])
    for name in names:
        if not name.startswith(_CHOOSABLE):
            raise ConfigurationError(
                f"objective={name} cannot be optimized: choices are made on records held out (val/..., with "
                "data.val_size; data by users: data.val_users) or on what the budget covers (private/...), not on test "
                "data or noiseless training data."
            )
        if name.startswith("val/") and not held_out:
            raise ConfigurationError(
                f"objective={name} needs records held out: set data.val_size, such as 1000 (data by users: "
                "data.val_users)."
            )
    default = getattr(get_class(config["module"]["_target_"]), "objective", None)
    if not names and held_out and default is not None:
        return [default]
    return names


def _holds_out(data: Mapping[str, Any]) -> bool:
    for option in ("val_size", "val_users"):
        if option in data:
            return bool(data[option])
    loader = getattr(get_class(data["_target_"]), "val_dataloader", None)
    return loader is not pl.LightningDataModule.val_dataloader


def refuse_choice(config: Mapping[str, Any], directions: Sequence[str]) -> None:
    """Refuse a choice that a sweeper which optimizes should not make.

    Args:
        config: Resolved configuration of a run.
        directions: "minimize" or "maximize" for each objective.

    Raises:
        ConfigurationError: There is nothing to choose by but test data, or the least accurate run would be chosen.
    """
    names = objectives_of(config)
    if not names:
        raise ConfigurationError(
            "this sweeper requires a metric to optimize, and these runs have only test data: hold out records with "
            "data.val_size, such as 1000 (data by users: data.val_users), or set an objective=private/..."
        )
    if len(names) != len(directions):
        raise ConfigurationError(
            f"hydra.sweeper.direction must have a direction for each objective ({', '.join(names)})."
        )
    for name, direction in zip(names, directions, strict=True):
        if name.endswith("/accuracy") and direction == "minimize":
            raise ConfigurationError(f"the sweeper would minimize {name}: set hydra.sweeper.direction=maximize.")


def values_of(record: Mapping[str, Any], config: Mapping[str, Any]) -> list[float]:
    """The values of a run's objectives, which it returns to a sweeper that optimizes.

    Args:
        record: The run's.
        config: Its configuration.

    Raises:
        ConfigurationError: One of them was not measured.
    """
    metrics = record["metrics"]
    values = []
    for name in objectives_of(config):
        value = metrics.get(name)
        if value is None:
            measured = ", ".join(key for key in metrics if key.startswith(_CHOOSABLE)) or "none"
            why = "is not finite" if name in metrics else "was not measured"
            raise ConfigurationError(f"objective={name} {why}; choose one of: {measured}.")
        values.append(float(value))
    return values
