"""Several rows of each record: frames of a video, windows of an image, both inputs of twins.

Which rows are a record's cannot be seen from one batch's numbers, and no sum over a batch shows whether it was taken
rightly: the tags of `record_axis` tell.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpbench.privacy.record_axis.tags import Axis


def by_row(x: Tensor, axis: Axis | None, records: int, rows: int) -> Tensor:
    """A tensor with the rows of the batch in front: (rows, *shape), with the other numbers of a row in `axis.dim`.

    Args:
        x: The tensor.
        axis: Axis of its records; None if it is the only record's.
        records: Number of records of the tags.
        rows: Number of rows of the batch, the same for each record.
    """
    if axis is None:
        return x[None]
    x = x.unflatten(axis.dim, (axis.outer, rows, axis.inner * records // rows))  # type: ignore[no-untyped-call]
    return x.movedim(axis.dim + 1, 0).flatten(axis.dim + 1, axis.dim + 2)


def row_of_each(x: Tensor, axis: Axis | None, records: int, rows: int) -> Tensor:
    """Row of the batch that each number in the dimension of the records belongs to.

    Args:
        x: The tensor.
        axis: Axis of its records; None if it is the only record's.
        records: Number of records of the tags.
        rows: Number of rows of the batch, the same for each record.
    """
    if axis is None:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)
    place = torch.arange(x.shape[axis.dim], device=x.device)
    return place // (axis.inner * records // rows) % rows
