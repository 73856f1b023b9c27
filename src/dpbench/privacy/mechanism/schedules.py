"""Schedules: how a value moves over the steps of a training, fixed before the first one.

A schedule that followed the records would itself be a release. So its values are computed from the number of steps
alone, before training, and stored: they are part of the plan, of the key of the noise and, release by release, of the
ledger.
"""

from __future__ import annotations

import math
import numbers
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from dpbench.errors import ConfigurationError

Schedule = str | Sequence[float] | Callable[[float], float]
"""Factor of a base value: "linear:E", "exponential:E", "cosine:E" (from 1 to E), "step:F@P/F@P" (factor F
from the share P of the steps on), "constant"; a factor for each step; or a function of the share of the steps that are
over, from 0 to 1."""

MOST_STAIRS = 20
"""Number of values that a named schedule or a function takes: each is a cost of its own, with a curve that takes
accountants a tenth of a second."""
_LARGEST = 1e6
_SMALLEST = 1 / _LARGEST
FORMS = "constant, linear:END, exponential:END, cosine:END or step:FACTOR@SHARE/FACTOR@SHARE (positive factors)"


@dataclass(frozen=True)
class Factors:
    """Factors of a base value, one for each step; after the last one it stays.

    Attributes:
        values: Positive; empty: always 1.
    """

    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.values)

    def at(self, step: int) -> float:
        """The factor of a step, counted from 0."""
        if not self.values:
            return 1.0
        last = len(self.values) - 1
        return self.values[min(step, last)]

    def to_list(self) -> list[list[float]]:
        """Plain JSON data: each factor with the number of steps in a row that have it.

        >>> Factors((1.0, 1.0, 0.5)).to_list()
        [[1.0, 2], [0.5, 1]]
        """
        return [[factor, len(list(steps))] for factor, steps in groupby(self.values)]


CONSTANT = Factors()


@dataclass(frozen=True)
class Schedules:
    """How the values of a training move; None: not.

    Attributes:
        noise_multiplier: Schedule of z.
        max_grad_norm: Schedule of the bounds of all groups.
    """

    noise_multiplier: Schedule | None = None
    max_grad_norm: Schedule | None = None


UNSCHEDULED = Schedules()


def factors_of(
    name: str,
    schedule: Schedule | None,
    steps: float,
) -> Factors:
    """Evaluate a schedule.

    Args:
        name: Name of the option, for messages.
        schedule: The schedule; None: the value stays.
        steps: Planned number of steps.

    Raises:
        ConfigurationError: The training has no end, or a value is no positive number.

    >>> factors_of("noise_schedule", "linear:0.5", 5).values
    (1.0, 0.875, 0.75, 0.625, 0.5)
    >>> factors_of("noise_schedule", "step:0.5@0.5/0.25@0.75", 4).values
    (1.0, 1.0, 0.5, 0.25)
    """
    if schedule is None or schedule == "constant":
        return Factors()
    if not (math.isfinite(steps) and steps >= 1):
        raise ConfigurationError(f"{name} needs a number of steps: set max_steps or max_epochs.")
    count = int(steps)
    if isinstance(schedule, str):
        values = _by_progress(name, _named(name, schedule), count)
    elif callable(schedule):
        values = _by_progress(name, schedule, count)
    else:
        values = list(schedule)
    if len(values) != count:
        raise ConfigurationError(f"{name} has {len(values)} factors for {count} steps: give one for each step.")
    number: Any
    for step, number in enumerate(values):
        # A bool is an int to Python.
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if not is_number or not _SMALLEST <= number <= _LARGEST:
            raise ConfigurationError(
                f"{name} must be a positive number from {_SMALLEST:g} to {_LARGEST:g} at every step, not {number!r} "
                f"(step {step})."
            )
    return Factors(tuple(map(float, values)))


def check_schedule(name: str, schedule: Schedule | None) -> None:
    """Raise ConfigurationError for a schedule that no number of steps gives a meaning."""
    if schedule is None or schedule == "constant":
        return
    if isinstance(schedule, str):
        _named(name, schedule)
    elif not isinstance(schedule, Sequence) and not callable(schedule):
        raise ConfigurationError(
            f"{name} must be {FORMS}, a list with a factor for each step, or a function, not {schedule!r}."
        )


def _by_progress(
    name: str,
    function: Callable[[float], float],
    steps: int,
) -> list[float]:
    """Values of a function of the share of steps that are over, one for each step, in at most `MOST_STAIRS` stairs."""
    stairs = min(steps, MOST_STAIRS)
    last = max(stairs - 1, 1)
    try:
        factors = [float(function(stair / last)) for stair in range(stairs)]
    except Exception as error:
        raise ConfigurationError(f"{name} cannot be evaluated: {type(error).__name__}: {error}.") from error
    return [factors[step * stairs // steps] for step in range(steps)]


_CURVES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda end, progress: 1 + (end - 1) * progress,
    "exponential": lambda end, progress: end**progress,
    "cosine": lambda end, progress: end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2,
}
"""(last factor, share of the steps that are over) → factor; from 1 on."""


def _named(name: str, schedule: str) -> Callable[[float], float]:
    """The function of a schedule such as "linear:0.5".

    Raises:
        ConfigurationError: There is no such schedule, or its numbers are out of range.
    """
    kind, _, parameters = schedule.partition(":")
    with suppress(ValueError):  # of a number that cannot be read: the message below shows the forms
        if kind == "step":
            return _stairs(parameters)
        end = float(parameters)
        if kind in _CURVES and 0 < end < math.inf:
            return partial(_CURVES[kind], end)
    raise ConfigurationError(f"{name} must be {FORMS}, not {schedule!r}.")


def _stairs(text: str) -> Callable[[float], float]:
    """Read "FACTOR@SHARE/FACTOR@SHARE": 1, and each factor from its share of the steps on.

    Raises:
        ValueError: They are no positive numbers, or the shares do not ascend from above 0 to below 1.
    """
    shares = [0.0]
    factors = [1.0]
    for stair in text.split("/"):
        factor, _, share = stair.partition("@")
        shares.append(float(share))
        factors.append(float(factor))
    if shares != sorted(set(shares)) or not shares[-1] < 1 or not min(factors) > 0:
        raise ValueError
    return lambda progress: factors[bisect_right(shares, progress) - 1]
