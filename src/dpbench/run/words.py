"""The words of a command line, one by one, before Hydra makes anything of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException

from dpbench.errors import ConfigurationError, brief
from dpbench.options import shown

MOST_JOBS = 10_000


def read_words(words: Sequence[str], loader: ConfigLoader) -> list[Override]:
    """Overrides as Hydra reads them.

    Raises:
        ConfigurationError: One of them, which is named, cannot be read, or is a range that has no end.
        HydraException: One is no override at all.
    """
    parser = OverridesParser.create(loader)
    return [_read(word, parser) for word in words]


def _read(word: str, parser: OverridesParser) -> Override:
    try:
        (one,) = parser.parse_overrides([word])
    except HydraException as error:
        if "missing EQUAL" in str(error):
            raise
        key, _, rest = word.partition("=")
        if key != key.rstrip():
            raise ConfigurationError(
                f"{shown(word)} cannot be read: leave out the blanks around =, as in {key.strip()}={rest.strip()}."
            ) from error
        raise ConfigurationError(
            f"{shown(word)} cannot be read ({brief(error)}): quote what is no plain word, such as \"KEY='A=B'\"."
        ) from error
    except ValueError as error:  # Python's, of a number with thousands of digits
        raise ConfigurationError(f"{shown(word)} cannot be read: {brief(error)}.") from error
    value = one.value()
    if isinstance(value, RangeSweep) and not value.step:
        raise ConfigurationError(f"{shown(word)} has a step of 0, and would never end.")
    return one


def refuse_many(overrides: Iterable[Override]) -> None:
    """Raise ConfigurationError where a sweep has more jobs than anybody wants, without making any."""
    jobs = math.prod(map(_size, overrides))
    if not jobs <= MOST_JOBS:
        raise ConfigurationError(f"the sweep has {jobs:,.0f} jobs, and more than {MOST_JOBS:,} are refused: divide it.")


def _size(one: Override) -> float:
    value = one.value()
    if isinstance(value, RangeSweep):
        start, stop, step = (float(number) for number in (value.start or 0, value.stop or 0, value.step))
        return max(0.0, math.ceil((stop - start) / step) if math.isfinite((stop - start) / step) else math.inf)
    return len(value.list) if isinstance(value, ChoiceSweep) else 1
