"""The rows of a batch that make up a record: one each, those named by a loader, or those of a microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpbench.data.collation import RecordOfRow
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.mechanism import Merge
from dpbench.records.training import Training

RowsOfLot = NDArray[np.int64]
"""Record (or microbatch) of each row of this process's share of a lot, ascending."""


def grouped_lots(loader: PrivateDataLoader, microbatch_size: int) -> tuple[int, int | None]:
    """Say how the rows of a batch make up its records, by one row each, an index of the loader, or microbatches.

    Returns:
        Number of microbatches in a batch, 0 if a record is an example; and the divisor of the sum over a record's rows,
        None for their number.

    Raises:
        ConfigurationError: The expected batch size is not a multiple of `microbatch_size`, or records are several rows.
    """
    if microbatch_size == 1:
        return 0, 1 if loader.record_of_row is None else None
    if loader.lots.size_factors:
        raise ConfigurationError(
            f"microbatch_size={microbatch_size} cannot be combined with expected_batch_size_schedule, as a batch has a "
            "fixed number of microbatches: leave one out."
        )
    if loader.record_of_row is not None:
        raise ConfigurationError(
            f"microbatch_size={microbatch_size} cannot be combined with record_of_row, as rows are clipped together "
            "either by record or by microbatch: leave one out."
        )
    size = loader.lots.expected_batch_size
    number = size / microbatch_size
    if number < 1 - 1e-9 or abs(number - round(number)) > 1e-6:
        raise ConfigurationError(
            f"microbatch_size={microbatch_size} does not fit batches of {size:g} records: choose "
            "a divisor of data.expected_batch_size."
        )
    return round(number), microbatch_size


def rows_of_lot(
    loader: PrivateDataLoader,
    step: int,
    training: Training,
    batch: Any,
    rows: int,
) -> RowsOfLot | None:
    """Record (or microbatch) of each row of this process's batch, ascending; None where each row is a record.

    Raises:
        ConfigurationError: The batch has other rows than its records make, or `record_of_row` is no index of them.
    """
    positions, microbatch_of = loader.lots.share(step, training.rank, training.world_size)
    if loader.record_of_row is not None:
        return _given(loader.record_of_row, batch, rows, len(positions))
    if rows != len(positions):
        raise ConfigurationError(
            f"the batch has {rows} rows but {len(positions)} records: each row is clipped separately, so a record "
            "with several rows (augmented views, windows of a text) would count several times, and missing rows "
            "cannot be attributed. Let the collate_fn make one row for each record, or declare which rows belong "
            "together: PrivateDataLoader(..., record_of_row=...)."
        )
    return microbatch_of


def _given(record_of_row: RecordOfRow, batch: Any, rows: int, records: int) -> RowsOfLot:
    try:
        values = batch[record_of_row] if isinstance(record_of_row, str) else record_of_row(batch)
    except (KeyError, TypeError, IndexError):
        raise ConfigurationError(f"record_of_row={record_of_row!r} is not an entry of the batch.") from None
    try:
        index = torch.as_tensor(values).cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        index = np.zeros(())
    if index.shape != (rows,) or index.dtype.kind not in "iu":
        raise ConfigurationError(
            f"record_of_row must give one whole number for each of the {rows} rows of the batch, not "
            f"{index.dtype} of shape {index.shape}."
        )
    if not rows:
        return index.astype(np.int64)
    in_range = index[0] >= 0 and index[-1] < records
    if not in_range or (np.diff(index) < 0).any():
        raise ConfigurationError(
            f"record_of_row must be ascending, from 0 to below the batch's {records} records (the position of each "
            "row's record in the list that the collate_fn was given), so that the rows of a record lie together."
        )
    return index.astype(np.int64)


def places_of_index(batch: Any, rows: int, index: RecordOfRow) -> list[int]:
    """Find the tensors of a batch (their places among all of them) that hold the record of each row.

    The one that the loader names, or that its function hands on, by itself or as a copy. Equal numbers are no sign of
    it: labels may be equal to the index by chance.

    Args:
        batch: Holds the rows.
        rows: Their number.
        index: An entry's name, or a function of the batch.
    """
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    entry = batch[index] if isinstance(index, str) else index(batch)
    places = [place for place, x in enumerate(tensors) if x is entry]
    if places or isinstance(index, str):
        return places
    columns = [place for place, x in enumerate(tensors) if _is_index(x, rows)]
    return [place for place in columns if _is_handed_on(batch, place, index)]


def _is_index(x: Tensor, rows: int) -> bool:
    is_whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return is_whole and x.shape == (rows,)


def _is_handed_on(batch: Any, place: int, index: Any) -> bool:
    """Return whether a function of the batch returns the numbers of the tensor at a place, for any numbers."""

    def marked(x: Tensor, is_marked: bool) -> Tensor:
        return torch.arange(1, len(x) + 1).to(x) if is_marked else x

    changed = map_tensors(batch, {place}, marked)
    mark = [x for x in tree_leaves(changed) if isinstance(x, Tensor)][place]
    try:
        returned = torch.as_tensor(index(changed)).cpu()
    except Exception:  # it may refuse numbers that are no index
        return False
    return torch.equal(returned.long(), mark.cpu().long())


def map_tensors(batch: Any, places: Container[int], change: Callable[[Tensor, bool], Tensor]) -> Any:
    """Apply a function to each tensor of a batch, and to whether the tensor is at one of some places."""
    numbers = itertools.count()

    def mapped(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return change(x, next(numbers) in places)

    return tree_map(mapped, batch)


def counted_from_zero(batch: Any, places: Container[int], record_of: RowsOfLot) -> Any:
    """Renumber the index of a batch's records from 0 on, in the order of their rows.

    All that a step makes of the index, such as a number of records (the largest one and one), is then the same for a
    batch as for its pieces, and knows nothing of other records.

    Args:
        batch: Batch, or some rows of it.
        places: Places of the tensors that are the index (`places_of_index`).
        record_of: Record of each row.
    """
    _, first, inverse = np.unique(record_of, return_index=True, return_inverse=True)
    ranks = first.argsort().argsort()  # of the records, by where each comes first
    numbers = torch.from_numpy(ranks[inverse])

    def counted(x: Tensor, is_index: bool) -> Tensor:
        return numbers.to(x) if is_index else x

    return map_tensors(batch, places, counted)


def merge_of(
    record_of: RowsOfLot | None,
    rows: slice,
    size: int | None,
    device: torch.device,
) -> Merge | None:
    """Grouping of the rows of a piece into records, those without a row left out.

    Args:
        record_of: Record (or microbatch) of each row of the batch, or None.
        rows: The piece.
        size: μ, by which the sum over a microbatch's rows is divided; None: the mean over each record's own rows, so
            that the bound has the meaning that it has for records of one row.
        device: Device of the gradients.
    """
    if record_of is None:
        return None
    present, place, counts = np.unique(record_of[rows], return_inverse=True, return_counts=True)
    places = torch.from_numpy(place.astype(np.int64)).to(device)
    if size is not None:
        return places, len(present), 1 / size
    factors = (1 / counts).astype(np.float32)
    return places, len(present), torch.from_numpy(factors).to(device)
