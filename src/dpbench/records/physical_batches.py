"""The pieces that a large batch is processed in."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpbench.data.collation import RecordOfRow
from dpbench.data.separate_records import SeparateRecords
from dpbench.records.grouping import counted_from_zero, places_of_index
from dpbench.records.training import Training


def cuts(records: int, size: int, microbatch_of: NDArray[np.int64] | None) -> list[int]:
    """Ends of the pieces of a batch, of at most `size` rows each; a microbatch is never cut.

    Args:
        records: Rows of the batch.
        size: Most rows of a piece; a larger microbatch is a piece of its own.
        microbatch_of: Microbatch of each row, ascending; None where a record is an example.

    Returns:
        Ascending; the last is `records`.
    """
    if records <= size:
        return [records]
    if microbatch_of is None:
        return [*range(size, records, size), records]
    first_rows = np.flatnonzero(np.diff(microbatch_of)) + 1  # of the microbatches but the first
    ends = [*first_rows.tolist(), records]
    chosen = []
    start = 0
    for end, following in pairwise(ends):
        if following - start > size:
            chosen.append(end)
            start = end
    return [*chosen, records]


def cut(
    batch: Any,
    records: int,
    size: int | None,
    microbatch_of: NDArray[np.int64] | None,
    training: Training | None,
    index: RecordOfRow | None = None,
) -> list[Any]:
    """Split a batch as `cuts` says.

    Args:
        batch: Batch, or a process's share of it.
        records: Its rows.
        size: Most rows of a piece; None: any number.
        microbatch_of: Microbatch of each row, as for `cuts`.
        training: Training whose processes take as many pieces each, some of them empty; None: none waits for another.
        index: Entry or function of the batch that gives `microbatch_of`, if any; each piece counts its records from 0.
    """
    if size is None and index is None:
        return [batch]
    ends = [0, records] if size is None else [0, *cuts(records, size, microbatch_of)]
    if training is not None and training.world_size > 1:
        missing = training.largest(len(ends)) - len(ends)
        ends += [records] * missing
    slices = [slice(start, end) for start, end in pairwise(ends)]
    pieces = [select(batch, records, rows) for rows in slices]
    if index is None:
        return pieces
    assert microbatch_of is not None
    places = places_of_index(batch, records, index)
    return [counted_from_zero(piece, places, microbatch_of[rows]) for piece, rows in zip(pieces, slices, strict=True)]


def select(batch: Any, records: int, index: slice | NDArray[np.int64]) -> Any:
    """Some rows of a batch: of its tensors and arrays, and of its lists with an entry for each row, such as texts.

    Args:
        batch: Tensors and lists in lists, tuples and dictionaries; or separate records.
        records: Number of its rows.
        index: Slice or positions; positions give copies, which know nothing of the batch's graph.
    """
    if isinstance(batch, SeparateRecords):
        if isinstance(index, slice):
            return SeparateRecords(batch[index])
        return SeparateRecords(copy.deepcopy(batch[row]) for row in index)

    def is_list_of_rows(x: Any) -> bool:
        if not isinstance(x, list | tuple) or len(x) != records:
            return False
        return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))

    def selected(x: Any) -> Any:
        if isinstance(x, Tensor):
            return _rows(x, index)
        if isinstance(x, np.ndarray) and x.ndim and len(x) == records:
            return x[index]
        if not is_list_of_rows(x):
            return x
        if isinstance(index, slice):
            return x[index]
        return type(x)([x[row] for row in index])

    return tree_map(selected, batch, is_leaf=is_list_of_rows)


def batch_for_step(piece: Any) -> Any:
    """Argument of the training step: for one separate record, its batch."""
    if not isinstance(piece, SeparateRecords):
        return piece
    (batch,) = piece
    return batch


def _rows(x: Tensor, index: slice | NDArray[np.int64]) -> Tensor:
    """Rows of a tensor, all of one that has none."""
    if isinstance(index, slice):
        return x[index] if x.dim() else x
    x = x.detach()
    if not x.dim():
        return x.clone()
    return x[torch.from_numpy(index).to(x.device)]
