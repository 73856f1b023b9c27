"""Choice of the batches that are checked: the first, and one of each octave (2^k to 2^(k+1) − 1) at a random place."""

from __future__ import annotations

from functools import cache

import numpy as np

# Powers of two would miss whatever is done in every third lot. With this salt, what is done in every n-th lot (n ≤ 10)
# meets a check before lot 128, and all of its phases (n ≤ 8) do before lot 512.
_SALT = 505


@cache
def _place(octave: int) -> int:
    low = 1 << octave
    return low + int(np.random.default_rng([_SALT, octave]).integers(low))


def is_checked(number: int) -> bool:
    """Return whether batch `number` (from 1) is checked."""
    return number > 0 and number == _place(number.bit_length() - 1)


def next_checked(number: int) -> int:
    """The first batch after batch `number` (from 1) that is checked."""
    octave = number.bit_length() - 1
    return _place(octave) if _place(octave) > number else _place(octave + 1)
