"""Finds a `collate_fn` that fills the places of unusable records up with others of the lot."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbench.data.mixing import collated
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError

_GROUPS = 32  # of records, each replaced once
_NUMBERS = 64  # of a row, by which equal ones are found first


def has_equal_rows(batch: Any) -> bool:
    """Whether two rows of a batch look the same, by some numbers of each: refilled ones do, honest twins too."""
    leaves = _leaves(batch)
    if not leaves or not leaves[0].numel():
        return False
    parts = [leaf[:, :: max(1, leaf.shape[1] // _NUMBERS)].double() for leaf in leaves]
    rows = _bytes_of(torch.cat(parts, dim=1))
    return len(set(rows)) < len(rows)


def refuse_refilling(collate: Callable[[Any], Any], records: Sequence[Any]) -> None:
    """Replace some records at a time by another one: no more rows may change than records did.

    Where a record fills the place of another, replacing it changes several rows. Rows may be sorted, and honest twins
    among the records stay what they are. Nothing is said of a `collate_fn` that fails, or is random beyond the seeds.

    Args:
        collate: The `collate_fn`; it is given copies.
        records: Of a lot, as they are fetched.

    Raises:
        ConfigurationError: A record has more rows than it should.
    """
    usable = [place for place, record in enumerate(records) if record is not None]
    try:
        first, again = (collated(collate, list(records)) for _ in range(2))
        if _changed(first, again):
            return  # random beyond the seeds
        for group in np.array_split(np.arange(len(records)), min(_GROUPS, len(records))):
            stand = next((place for place in usable if place not in group), None)
            if stand is None:
                continue
            changed = list(records)
            for place in group:
                changed[place] = copy.deepcopy(records[stand])
            other = collated(collate, changed)
            if _changed(first, other) > len(group):
                break
        else:
            return
    except Exception:  # the lot itself says what is wrong
        return
    raise ConfigurationError(
        "the collate_fn fills the places of some records up with others of the lot: a record then has several rows, "
        "each clipped by itself, and epsilon does not hold for it. Leave records that cannot be used out of the data "
        "set (torch.utils.data.Subset), or make an empty row for each of them, such as zeros."
    )


def _changed(one: Any, other: Any) -> int:
    """Number of rows of a batch that another one, of the same shape, does not have; 0 where they cannot be compared."""
    mine = _leaves(one)
    theirs = _leaves(other)
    if [leaf.shape[1:] for leaf in mine] != [leaf.shape[1:] for leaf in theirs] or not mine:
        return 0  # padded to another length
    a, b = (torch.cat([leaf.double() for leaf in leaves], dim=1) for leaves in (mine, theirs))
    rows = _bytes_of(a)
    others = _bytes_of(b)
    only = Counter(rows) - Counter(others)
    spare = Counter(others) - Counter(rows)
    near = [b[others.index(row)] for row in spare for _ in range(spare[row])]
    count = 0
    for row, times in only.items():
        value = a[rows.index(row)]
        for _ in range(times):
            twin = next(
                (n for n, one in enumerate(near) if torch.allclose(value, one, 1e-4, 1e-6, equal_nan=True)), None
            )
            count += twin is None
            if twin is not None:
                del near[twin]  # the same but for rounding
    return count


def _leaves(batch: Any) -> list[Tensor]:
    """Tensors of a batch with as many rows as it has, each (rows, numbers)."""
    know_as_tree(batch)
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    rows = max((len(leaf) for leaf in tensors), default=0)
    return [leaf.detach().reshape(rows, -1) for leaf in tensors if rows and len(leaf) == rows]


def _bytes_of(table: Tensor) -> list[bytes]:
    return [row.tobytes() for row in table.contiguous().numpy()]
