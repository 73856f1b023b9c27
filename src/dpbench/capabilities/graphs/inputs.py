"""Memory at fixed addresses for the batches that a graph reads, padded to one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Padding:
    """Counts the records of padded batches, which are their first rows, on the device.

    Args:
        rows: Number of rows of every batch.
        device: Device of the batches.

    Attributes:
        rows: Number of rows of every batch.
        counted: Number of records in the present batch, int64, shape (); set by `count`, read by a graph.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.counted = torch.zeros((), dtype=torch.int64, device=device)
        self._positions = torch.arange(rows, device=device)

    def count(self, records: int) -> None:
        """Begin a batch of so many records."""
        self.counted.fill_(records)

    def present(self) -> Tensor:
        """Mask of the rows that are records, bool, shape (rows,)."""
        return self._positions < self.counted


def inputs_of(leaves: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Memory for batches like this one, of `rows` rows."""
    inputs = []
    for leaf in leaves:
        shape = (rows, *leaf.shape[1:]) if leaf.dim() else ()
        memory = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        inputs.append(memory.to(memory_format=_layout(leaf)))
    return inputs


def kinds(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """Properties that batches of one network have in common, for any number of rows."""
    return tuple((leaf.dim(), leaf.shape[1:], leaf.dtype, _layout(leaf)) for leaf in leaves)


def fill(inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copy a batch into its memory.

    Further rows are copies of the first record, which any network can compute.

    Args:
        inputs: The memory.
        leaves: Tensors of the batch, each with a row at least.
    """
    for buffer, leaf in zip(inputs, leaves, strict=True):
        if not leaf.dim():
            buffer.copy_(leaf)
            continue
        rows = len(leaf)
        buffer[:rows].copy_(leaf)
        if rows < len(buffer):
            buffer[rows:].copy_(leaf[:1].expand(len(buffer) - rows, *leaf.shape[1:]))


def _layout(leaf: Tensor) -> torch.memory_format:
    is_channels_last = leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last)
    if is_channels_last and not leaf.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
