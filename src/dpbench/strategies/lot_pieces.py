"""The pieces that a large lot is processed in, and the microbatches of its rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from dpbench.privacy.mechanism import Merge


def cuts(records: int, size: int | None, microbatch_of: NDArray[np.int64] | None) -> list[int]:
    """Ends of the pieces of a lot, of at most `size` rows each; a microbatch is never cut.

    Args:
        records: Rows of the lot.
        size: Most rows of a piece (a larger microbatch is a piece of its own); None: no limit.
        microbatch_of: Microbatch of each row, ascending; None where a record is an example.

    Returns:
        Ascending; the last is `records`.
    """
    if size is None or records <= size:
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


def cut(batch: Any, ends: list[int], trainer: pl.Trainer) -> list[Any]:
    """Split a batch at `ends`, into as many pieces on each process; some may be empty."""
    count = torch.tensor(len(ends), device=trainer.strategy.root_device)
    if trainer.world_size > 1:  # logging in training_step may wait for the other processes
        dist.all_reduce(count, dist.ReduceOp.MAX)
    ends = [0, *ends, *[ends[-1]] * (int(count) - len(ends))]
    if len(ends) == 2:
        return [batch]

    def piece(start: int, end: int) -> Any:
        return tree_map(lambda x: x[start:end] if isinstance(x, Tensor) and x.dim() else x, batch)

    return [piece(start, end) for start, end in pairwise(ends)]


def merge_of(microbatch_of: NDArray[np.int64] | None, rows: slice, size: int, device: torch.device) -> Merge | None:
    """How the rows of a piece become microbatches, empty ones left out; each is the sum over its rows divided by μ.

    Args:
        microbatch_of: Microbatch of each row of the lot, or None.
        rows: The piece.
        size: μ.
        device: Of the gradients.
    """
    if microbatch_of is None:
        return None
    present, record_of = np.unique(microbatch_of[rows], return_inverse=True)
    return torch.from_numpy(record_of.astype(np.int64)).to(device), len(present), 1 / size
