"""Lots that are no table of rows: graphs, images with their boxes, ragged lists. Each record is a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import register_pytree_node


class SeparateRecords(list[Any]):
    """A lot as batches of one record each, as the `collate_fn` made them of each record alone."""

    def mapped(self, change: Callable[[Any], Any]) -> SeparateRecords:
        """Apply a function to each batch of the lot."""
        return SeparateRecords(map(change, self))


register_pytree_node(
    SeparateRecords,
    lambda lot: (list(lot), None),
    lambda parts, _: SeparateRecords(parts),
)
