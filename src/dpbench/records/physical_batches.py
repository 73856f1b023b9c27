"""The pieces that a large lot is processed in."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpbench.records.training import Training


def cuts(records: int, size: int, microbatch_of: NDArray[np.int64] | None) -> list[int]:
    """Ends of the pieces of a lot, of at most `size` rows each; a microbatch is never cut.

    Args:
        records: Rows of the lot.
        size: Most rows of a piece; a larger microbatch is a piece of its own.
        microbatch_of: Microbatch of each row, ascending; None where a record is an example.

    Returns:
        Ascending; the last is `records`.
    """
    if records <= size:
        return [records]
    if microbatch_of is None:
        return [*range(size, records, size), records]
    ends = [*(np.flatnonzero(np.diff(microbatch_of)) + 1).tolist(), records]
    chosen, start = [], 0
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
    training: Training,
) -> list[Any]:
    """Split a batch as `cuts` says, into as many pieces on each process; some may be empty."""
    if size is None:
        return [batch]
    ends = [0, *cuts(records, size, microbatch_of)]
    if training.world_size > 1:  # logging in training_step may wait for the other processes
        ends += [records] * (training.largest(len(ends)) - len(ends))

    return [select(batch, records, slice(start, end)) for start, end in pairwise(ends)]


def select(batch: Any, records: int, index: slice | NDArray[np.int64]) -> Any:
    """Some rows of a batch: of its tensors, and of its lists with an entry for each row, such as texts.

    Args:
        batch: Tensors and lists in lists, tuples and dictionaries.
        records: Number of its rows.
        index: Which; positions give copies, which know nothing of the batch's graph.
    """

    def entries(x: Any) -> bool:
        return (
            isinstance(x, list | tuple) and len(x) == records and not any(isinstance(y, Tensor) for y in tree_leaves(x))
        )

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            if isinstance(index, slice):
                return x[index] if x.dim() else x
            return x.detach()[torch.from_numpy(index).to(x.device)] if x.dim() else x.detach().clone()
        if entries(x):
            return x[index] if isinstance(index, slice) else type(x)([x[i] for i in index])
        return x

    return tree_map(of, batch, is_leaf=entries)
