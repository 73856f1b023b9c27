"""Batches that are not tables of rows: graphs, images with their boxes, ragged lists. Each record is a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import register_pytree_node


class SeparateRecords(list[Any]):
    """A batch as a list of batches of one record each, as the `collate_fn` made them."""

    def mapped(self, change: Callable[[Any], Any]) -> SeparateRecords:
        """Apply a function to the batch of each record."""
        return SeparateRecords(map(change, self))


register_pytree_node(
    SeparateRecords,
    lambda lot: (list(lot), None),
    lambda parts, _: SeparateRecords(parts),
)
