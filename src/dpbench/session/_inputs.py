"""Memory at fixed addresses for the batches that a graph reads: of one size, or of all sizes, padded to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Padding:
    """Which rows of padded batches are records, on the device: the first ones.

    Args:
        rows: Of every batch.
        device: Of the batches.

    Attributes:
        rows: Of every batch.
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
        """Which rows are records, bool, shape (rows,)."""
        return self._positions < self.counted


class Inputs:
    """Memory for the tensors of batches; batches of several sizes share it."""

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def clear(self) -> None:
        """Let go of it."""
        self._buffers.clear()

    def of_one_size(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Memory for batches like this one, of its size and layout."""
        return [self._of_one_size(position, leaf) for position, leaf in enumerate(leaves)]

    def of_all_sizes(self, leaves: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Memory for batches like this one of up to `rows` rows, that many in all."""
        inputs = []
        for position, leaf in enumerate(leaves):
            key = (position, *_kind(leaf), rows)
            if key not in self._buffers:
                shape = (rows, *leaf.shape[1:]) if leaf.dim() else ()
                buffer = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
                self._buffers[key] = buffer.to(memory_format=_layout(leaf))
            inputs.append(self._buffers[key])
        return inputs

    def _of_one_size(self, position: int, leaf: Tensor) -> Tensor:
        if leaf.dim() == 0:
            return torch.empty_like(leaf)
        rows = len(leaf)
        key = (position, leaf.shape[1:], leaf.stride(), leaf.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < rows:
            # A recording of a smaller size keeps the memory that it had.
            larger = (rows + rows // 4, *leaf.shape[1:])
            span = 1
            for length, stride in zip(larger, leaf.stride(), strict=True):
                span += (length - 1) * stride
            memory = leaf.new_empty(span)
            buffer = memory.as_strided(larger, leaf.stride())
            self._buffers[key] = buffer
        return buffer[:rows]


def kinds(leaves: Sequence[Tensor]) -> tuple[Any, ...]:
    """What batches of one network have in common, whatever their size."""
    return tuple(_kind(leaf) for leaf in leaves)


def fill(inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copy a batch into its memory.

    Further rows are copies of the first record: something that the network can compute, whatever it does with it.

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


def _kind(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.dim(), leaf.shape[1:], leaf.dtype, _layout(leaf)


def _layout(leaf: Tensor) -> torch.memory_format:
    is_channels_last = leaf.dim() == 4 and leaf.is_contiguous(memory_format=torch.channels_last)
    if is_channels_last and not leaf.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
