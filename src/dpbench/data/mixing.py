"""Finds a `collate_fn` that makes a row of several records (mixup, cutmix, batch statistics), by collating again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError

_MOST = 32  # records that are collated again
_STAND_INS = 2  # of them, each in the place of all others
_SAME = "same"
_SORTED = "sorted"
_MIXED = "mixed"

Rows = Callable[[Any, NDArray[np.int64], int], NDArray[np.int64]]
"""Rows of a batch that some records, named by their positions, have; and the number of all records in it."""


def rows_of(
    record_of_row: Any,
    batch: Any,
    records: NDArray[np.int64],
    number: int,
) -> NDArray[np.int64]:
    """Rows of some records, by `LotLoader`'s `record_of_row`; without one each record is a row."""
    if record_of_row is None:
        return records
    found = np.asarray(batch[record_of_row] if isinstance(record_of_row, str) else record_of_row(batch))
    ascending = found.dtype.kind in "iu" and found.shape == (_rows(batch),) and (np.diff(found) >= 0).all()
    if not ascending or not ((found >= 0) & (found < number)).all():
        raise ValueError("no index of records")
    return np.flatnonzero(np.isin(found, records))


def _rows(batch: Any) -> int:
    return max(len(x) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim())


def refuse_mixing(
    collate: Callable[[Any], Any],
    records: Sequence[Any],
    number: int,
    rows: Rows,
    ordered: bool = False,
) -> None:
    """Collate some records again among others, with the same random numbers: the rows of a record must be the same.

    Nothing is said of a `collate_fn` that is random beyond the seeds of torch, numpy and `random`, or that fails.

    Args:
        collate: The `collate_fn`; it is given copies.
        records: Of a lot.
        number: Chooses among them.
        rows: Rows of a record.
        ordered: Whether rows must come in the order of their records, because it says which microbatch is whose.

    Raises:
        ConfigurationError: They depend on the other records, or come in an order that does.
    """
    rng = np.random.default_rng(number)
    some = [records[i] for i in rng.permutation(len(records))[:_MOST]]
    whole = np.arange(len(some))
    kept, others = (np.sort(half) for half in np.array_split(rng.permutation(whole), 2))
    moved = whole.copy()
    replaced = whole.copy()
    moved[others] = np.roll(others, 1)  # the same records: texts are padded to the same length
    replaced[others] = 0
    try:
        first, again, *changed = (
            collated(collate, [some[i] for i in order]) for order in (whole, whole, moved, replaced)
        )
        own = [rows(batch, kept, len(some)) for batch in (first, again, *changed)]
        known = _same(first, again, own[0], own[1]) == _SAME  # else it is random beyond the seeds
        pairs = zip(changed, own[2:], strict=True)
        found = [_same(first, other, own[0], theirs) for other, theirs in pairs] if known else []
        if known and any(_other_numbers(first, collated(collate, [one] * len(some))) for one in some[:_STAND_INS]):
            found.append(_MIXED)
        sorts = ordered and known and (_SORTED in found or _unmoved(first, changed[0], others))
    except Exception:  # the lot itself says what is wrong
        return
    if sorts and _MIXED not in found:
        raise ConfigurationError(
            "the collate_fn puts the records of a lot into another order, and with microbatch_size the place of a row "
            "says which microbatch it is in: sorted, one record would move others into other microbatches. Keep the "
            "order (pack_padded_sequence(..., enforce_sorted=False) takes any), or leave microbatch_size at 1."
        )
    if _MIXED in found:
        raise ConfigurationError(
            "the collate_fn makes the rows of a record from other records too (mixup, cutmix, batch statistics, a "
            "number of the whole lot), or record_of_row names other records: then clipping does not bound what one "
            "record does. Let it make each row of one record alone."
        )


def collated(collate: Callable[[Any], Any], records: list[Any]) -> Any:
    """What a `collate_fn` makes of copies of some records, with the random numbers that come next; they come again."""
    with random_numbers_kept():
        return collate([copy.deepcopy(record) for record in records])  # one that stands twice is two


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Inside, random numbers of torch, numpy and `random` may be drawn: afterwards they come again."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _same(
    one: Any,
    other: Any,
    mine: NDArray[np.int64],
    theirs: NDArray[np.int64],
) -> str | None:
    """How some rows of two batches compare; None where they cannot be compared."""
    pairs = list(zip(_leaves(one), _leaves(other), strict=True))
    if any(a.shape[1:] != b.shape[1:] for a, b in pairs):
        return None  # padded to another length
    if len(mine) == len(theirs) and all(_close(a[mine], b[theirs]).all() for a, b in pairs):
        return _SAME
    # Or sorted, as packed sequences are: then each row is still one that was there.
    alike = torch.stack([_close(a[:, None], b[None]).reshape(len(a), len(b), -1).all(2) for a, b in pairs])
    return _SORTED if alike.all(0).any(0).all() else _MIXED


def _other_numbers(one: Any, other: Any) -> bool:
    """Whether numbers of two batches that belong to no row, such as a scale for all of them, differ."""
    numbers = _numbers(one)
    if not numbers:
        return False
    if any(a.shape != b.shape for a, b in zip(_leaves(one), _leaves(other), strict=True)):
        return False  # padded to another length, which such a number may be
    return not all(_close(a, b) for a, b in zip(numbers, _numbers(other), strict=True))


def _numbers(batch: Any) -> list[Tensor]:
    numbers = []
    for x in tree_leaves(batch):
        if isinstance(x, int | float) or (isinstance(x, Tensor | np.ndarray | np.number) and not x.ndim):
            numbers.append(torch.as_tensor(x).double())
    return numbers


def _unmoved(one: Any, other: Any, rows: NDArray[np.int64]) -> bool:
    """Whether a batch stayed as it was though some records, that differ, changed places."""
    pairs = list(zip(_leaves(one), _leaves(other), strict=True))
    moved = any(not _close(a[rows], a[np.roll(rows, 1)]).all() for a, _ in pairs)
    return moved and all(a.shape == b.shape and _close(a, b).all() for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> Tensor:
    return torch.isclose(a, b, 1e-4, 1e-6, equal_nan=True)


def _leaves(batch: Any) -> list[Tensor]:
    know_as_tree(batch)
    return [x.double() for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()]
