"""Pairwise coverage: a few rows of a table in which every pair of values of two axes stands that can stand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = tuple[str, ...]
Pair = tuple[int, str, int, str]
"""(axis, value, axis, value)"""


def valid_rows(axes: Mapping[str, Sequence[str]], is_valid: Callable[..., bool]) -> list[Row]:
    """All rows, one value for each axis, that may stand in the table.

    Args:
        axes: Name → values.
        is_valid: Called with one value for each axis, by its name.
    """
    rows = itertools.product(*axes.values())
    return [row for row in rows if is_valid(**dict(zip(axes, row, strict=True)))]


def pairs_of(row: Row) -> set[Pair]:
    """The pairs of values that a row covers."""
    numbered = list(enumerate(row))
    return {(*one, *other) for one, other in itertools.combinations(numbered, 2)}


def pairwise(rows: Sequence[Row]) -> list[Row]:
    """Few of the rows, which cover every pair of values that any of them covers.

    Greedy (each row covers as many new pairs as any, the first such row is taken), hence the same for the same rows.

    >>> pairwise([("a", "x"), ("a", "y"), ("b", "y"), ("a", "x")])
    [('a', 'x'), ('a', 'y'), ('b', 'y')]
    """
    bits: dict[Pair, int] = {}
    masks = []
    for row in rows:
        mask = 0
        for pair in sorted(pairs_of(row)):
            mask |= 1 << bits.setdefault(pair, len(bits))
        masks.append(mask)
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda place: ((masks[place] & missing).bit_count(), -place))
        chosen.append(rows[best])
        missing &= ~masks[best]
    return chosen
