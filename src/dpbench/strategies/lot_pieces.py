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
from torch.utils._pytree import tree_leaves, tree_map

from dpbench.data.lots import LotLoader, RecordOfRow
from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism import Merge
from dpbench.strategies.guards import ddp_strategies, refuse_other_rows


def grouping(loader: LotLoader, microbatch_size: int) -> tuple[int, int | None]:
    """How the rows of a lot make up its records.

    Returns:
        Number of microbatches in a lot, 0 where a record is an example; and what the sum over the rows of a record is
        divided by, None for their number.

    Raises:
        ConfigurationError: The expected lot size is not a multiple of `microbatch_size`, or records are several rows.
    """
    if microbatch_size == 1:
        return 0, 1 if loader.record_of_row is None else None
    if loader.record_of_row is not None:
        raise ConfigurationError(
            f"microbatch_size={microbatch_size} does not go with record_of_row: the rows of one record, or those of a "
            "microbatch, can be clipped together, not both. Leave one out."
        )
    sampling = loader.lots.sampling
    number = sampling.expected_batch_size / microbatch_size
    if number < 1 - 1e-9 or abs(number - round(number)) > 1e-6:
        raise ConfigurationError(
            f"microbatch_size={microbatch_size} does not fit lots of {sampling.expected_batch_size:g} records: choose "
            "a divisor of data.expected_batch_size."
        )
    return round(number), microbatch_size


def records_of_rows(
    loader: LotLoader, step: int, trainer: pl.Trainer, batch: Any, rows: int
) -> NDArray[np.int64] | None:
    """Record (or microbatch) of each row of this process's batch, ascending; None where each row is a record.

    Raises:
        ConfigurationError: The batch has other rows than its lot has records, or `record_of_row` is no index of them.
    """
    positions, microbatch_of = loader.lots.share(step, trainer.global_rank, trainer.world_size)
    if loader.record_of_row is not None:
        return _given(loader.record_of_row, batch, rows, len(positions))
    refuse_other_rows(rows, len(positions))
    return microbatch_of


def _given(record_of_row: RecordOfRow, batch: Any, rows: int, records: int) -> NDArray[np.int64]:
    try:
        found = batch[record_of_row] if isinstance(record_of_row, str) else record_of_row(batch)
    except (KeyError, TypeError, IndexError):
        raise ConfigurationError(f"record_of_row={record_of_row!r} is no entry of the batch.") from None
    try:
        index = torch.as_tensor(found).cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        index = np.zeros(())
    if index.shape != (rows,) or index.dtype.kind not in "iu":
        raise ConfigurationError(
            f"record_of_row must give one whole number for each of the {rows} rows of the batch, not "
            f"{index.dtype} of shape {index.shape}."
        )
    if rows and (index[0] < 0 or index[-1] >= records or (np.diff(index) < 0).any()):
        raise ConfigurationError(
            f"record_of_row must be ascending, from 0 to below the lot's {records} records (the position of each row's "
            "record in the list that the collate_fn was given), so that the rows of a record lie together."
        )
    return index.astype(np.int64)


def leave_gradients_alone(trainer: pl.Trainer) -> None:
    """Keep DDP from averaging gradients among processes: sums are added when they are released."""
    if isinstance(trainer.strategy, ddp_strategies()):
        assert trainer.strategy.model is not None
        trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[assignment]


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
    batch: Any, records: int, size: int | None, microbatch_of: NDArray[np.int64] | None, trainer: pl.Trainer
) -> list[Any]:
    """Split a batch as `cuts` says, into as many pieces on each process; some may be empty."""
    if size is None:
        return [batch]
    ends = [0, *cuts(records, size, microbatch_of)]
    if trainer.world_size > 1:  # logging in training_step may wait for the other processes
        count = torch.tensor(len(ends), device=trainer.strategy.root_device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        ends += [records] * (int(count) - len(ends))

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


def merge_of(record_of: NDArray[np.int64] | None, rows: slice, size: int | None, device: torch.device) -> Merge | None:
    """How the rows of a piece become records, those without a row left out.

    Args:
        record_of: Record (or microbatch) of each row of the lot, or None.
        rows: The piece.
        size: μ, by which the sum over a microbatch's rows is divided; None: the mean over each record's own rows, so
            that the bound means what it means for records of one row.
        device: Of the gradients.
    """
    if record_of is None:
        return None
    present, place, counts = np.unique(record_of[rows], return_inverse=True, return_counts=True)
    factor = torch.from_numpy((1 / counts).astype(np.float32)).to(device) if size is None else 1 / size
    return torch.from_numpy(place.astype(np.int64)).to(device), len(present), factor
