"""Several rows of each record in dimension 0: frames of a video, windows of an image, both inputs of twins.

Which rows are a record's cannot be seen from one lot's numbers, and no sum over a lot shows whether it was taken
rightly: the tags of `record_axis` tell.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from dpbench.privacy.record_axis.tags import Axis


class Fold(Enum):
    """Which of k·R rows are record r's."""

    CONTIGUOUS = "contiguous"  # r·k ... r·k + k - 1, as of x.flatten(0, 1)
    STRIDED = "strided"  # r, r + R, r + 2R, ... as of torch.cat([first, second])

    def by_record(self, x: Tensor, records: int) -> Tensor:
        """Rows (k·R, ...) as (R, k, ...)."""
        of_record = len(x) // records
        if self is Fold.CONTIGUOUS:
            return x.reshape(records, of_record, *x.shape[1:])
        return x.reshape(of_record, records, *x.shape[1:]).transpose(0, 1)

    def record_of(self, rows: int, records: int, device: torch.device) -> Tensor:
        """Record of each of k·R rows."""
        row = torch.arange(rows, device=device)
        if self is Fold.CONTIGUOUS:
            return row // (rows // records)
        return row % records


def fold_of(axis: Axis, rows_of_record: int = 1) -> Fold | None:
    """The fold of a layer's rows; None if it has one for each row of the batch, or takes them in another order.

    Args:
        axis: Where the layer has the records of its input.
        rows_of_record: Neighboring rows of the batch that make up a record.
    """
    inner, rest = divmod(axis.inner, rows_of_record)
    if axis.dim or rest or inner * axis.outer == 1:
        return None
    if axis.outer == 1:
        return Fold.CONTIGUOUS
    return Fold.STRIDED if inner == 1 else None


def by_row(x: Tensor, axis: Axis | None, records: int, rows: int) -> Tensor:
    """A tensor with the rows of the batch in front: (rows, *shape), with the other numbers of a row in `axis.dim`.

    Args:
        x: The tensor.
        axis: Where it has the records; None if it is the only record's.
        records: Number of records of the tags.
        rows: Number of rows of the batch, the same for each record.
    """
    if axis is None:
        return x[None]
    x = x.unflatten(axis.dim, (axis.outer, rows, axis.inner * records // rows))
    return x.movedim(axis.dim + 1, 0).flatten(axis.dim + 1, axis.dim + 2)


def is_folded(x: Tensor, records: int) -> bool:
    """Whether a tensor may hold the same number of rows for each record, and more than one."""
    return x.dim() > 0 and 0 < records < len(x) and len(x) % records == 0
