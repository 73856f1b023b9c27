"""The settings of trials: lists and ranges of options, each drawn independently of all else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from dpbench.errors import ConfigurationError, brief
from dpbench.harness.runs.command import key_of

MOST_PLANS = 200
_WITHOUT_COST = ("optimizer.", "schedule.")
"""Begin keys of post-processing: no release's cost depends on them."""
_OF_THE_TUNER = (
    "strategy.noise_multiplier",
    "strategy.target_epsilon",
    "strategy.delta",
    "strategy.accountant",
    "strategy.secure",
    "strategy=none",
    "audit",
    "run.",
    "hydra",
    "logger",
    "launcher",
    "diagnostics",
    "objective",
    "after",
    "seed",
    "data.membership",
    "data.inserted",
)


_SAME_RECORDS = (
    "data",
    "data.name",
    "data.root",
    "data.options",
    "data.unit",
    "data.split",
    "data.val_size",
    "data.val_users",
    "data.train_size",
    "data.test_size",
)
"""Keys that decide on which records all trials are trained and scored."""


@dataclass(frozen=True)
class Choice:
    """An option with a list of values, each as probable as the others.

    Attributes:
        key: Key of the option.
        values: Values, as words.
    """

    key: str
    values: tuple[str, ...]

    def draw(self, rng: np.random.Generator) -> str:
        """One word of a trial."""
        return f"{self.key}={self.values[rng.integers(len(self.values))]}"

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


@dataclass(frozen=True)
class Interval:
    """An option with an interval of numbers, drawn uniformly, by their logarithms if wanted.

    Attributes:
        key: Key of the option.
        low: Smallest number.
        high: Largest number.
        is_log: True for numbers with uniform logarithms.
    """

    key: str
    low: float
    high: float
    is_log: bool

    def draw(self, rng: np.random.Generator) -> str:
        """One word of a trial."""
        if self.is_log:
            return f"{self.key}={math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.4g}"
        return f"{self.key}={rng.uniform(self.low, self.high):.4g}"

    def __str__(self) -> str:
        interval = f"interval({self.low:g},{self.high:g})"
        return f"{self.key}={f'tag(log,{interval})' if self.is_log else interval}"


@dataclass(frozen=True)
class Space:
    """All settings of trials, fixed before the first one.

    Attributes:
        words: Options that all trials have.
        options: Options that each trial draws.
    """

    words: tuple[str, ...]
    options: tuple[Choice | Interval, ...]

    def draw(self, rng: np.random.Generator) -> tuple[str, ...]:
        """Own words of a trial."""
        return tuple(option.draw(rng) for option in self.options)

    def plans(self) -> list[tuple[str, ...]]:
        """Own words of trials that may differ in cost.

        Options without influence on cost are left out.

        Raises:
            ConfigurationError: There are more than `MOST_PLANS`.
        """
        lists = [
            [f"{option.key}={value}" for value in option.values]
            for option in self.options
            if isinstance(option, Choice) and not is_free(option.key)
        ]
        if math.prod(map(len, lists)) > MOST_PLANS:
            raise ConfigurationError(
                f"the lists have {math.prod(map(len, lists))} combinations that may differ in cost, and at most "
                f"{MOST_PLANS} are planned: shorten lists of options other than {' and '.join(_WITHOUT_COST)}..."
            )
        return list(itertools.product(*lists))

    @property
    def free(self) -> tuple[str, ...]:
        """Options that are drawn and cost nothing, as the ledger states them."""
        return tuple(str(option) for option in self.options if is_free(option.key))


def is_free(key: str) -> bool:
    """Return whether no release's cost depends on an option."""
    return key.startswith(_WITHOUT_COST)


def read_space(
    words: Sequence[str],
    swept_by: Callable[[Sequence[str]], Sequence[str]] = lambda words: (),
) -> Space:
    """Read the options of a tuning.

    Args:
        words: Hydra overrides; lists (`a=1,2`) and, for options of the optimizer, intervals (`a=interval(0.1,1)`,
            `a=tag(log,interval(0.1,1))`) are drawn.
        swept_by: Function of the words that are not drawn: further lists and intervals, for other keys.

    Raises:
        ConfigurationError: A word is malformed, sets an option of the tuner, or nothing is drawn.
    """
    fixed, drawn = _parted(words)
    given = {key_of(word) for word in words}
    _, further = _parted([word for word in swept_by(fixed) if key_of(word) not in given])
    drawn += further
    if not drawn:
        raise ConfigurationError("nothing is tuned: give an option several values, such as optimizer.lr=0.1,0.3,1.")
    keys = [option.key for option in drawn]
    if len(set(keys)) < len(keys):
        raise ConfigurationError(f"{max(keys, key=keys.count)} is given twice.")
    return Space(tuple(fixed), tuple(drawn))


def _parted(words: Sequence[str]) -> tuple[list[str], list[Choice | Interval]]:
    """Words that are not drawn, and options that are."""
    fixed: list[str] = []
    drawn: list[Choice | Interval] = []
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigurationError(f"{word}: {brief(error)}") from error
        if word.lstrip("+~").startswith(_OF_THE_TUNER):
            raise ConfigurationError(f"{word}: dpbench tune sets this itself, or has no use for it. Remove it.")
        if override.is_sweep_override():
            if key_of(word).startswith(_SAME_RECORDS[1:]) or key_of(word) == _SAME_RECORDS[0]:
                raise ConfigurationError(f"{word}: all trials have the same records. Give one value.")
            drawn.append(_drawn(override))
        else:
            fixed.append(word)
    return fixed, drawn


def _drawn(override: Override) -> Choice | Interval:
    key = override.get_key_element()
    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high, is_log = value.start, value.end, "log" in value.tags
        if not is_free(key.lstrip("+")):
            raise ConfigurationError(
                f"{override.input_line}: an interval is possible where cost does not depend on the value (optimizer. "
                "and schedule.); give a list."
            )
        if not (low is not None and high is not None and low < high and (low > 0 or not is_log)):
            raise ConfigurationError(f"{override.input_line} is no interval of numbers to draw from.")
        return Interval(key, float(low), float(high), is_log)
    if isinstance(value, RangeSweep) and value.step == 0:
        raise ConfigurationError(f"{override.input_line} has no end.")
    values = tuple(override.sweep_string_iterator())
    if not values:
        raise ConfigurationError(f"{override.input_line} has no value.")
    return Choice(key, values)
