"""Lots that are no table of rows: graphs, images with their boxes, ragged lists. Each record is a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves

from dpbench.data.trees import know_as_tree, unopened


class SeparateRecords(list[Any]):
    """A lot as batches of one record each, what the `collate_fn` made of each record alone."""

    def mapped(self, change: Callable[[Any], Any]) -> SeparateRecords:
        """The lot with what `change` makes of each batch in its place."""
        return SeparateRecords(map(change, self))


register_pytree_node(
    SeparateRecords,
    lambda lot: (list(lot), None),
    lambda parts, _: SeparateRecords(parts),
)


def has_rows(batch: Any, records: int, one: Any) -> bool:
    """Whether dimension 0 of all tensors and arrays of a batch is its records.

    That sizes agree proves nothing: three images of three channels in a list are no rows.

    Args:
        batch: Of several records.
        records: Their number.
        one: What the same `collate_fn` makes of one of them.
    """
    if unopened(batch) is not None or unopened(one) is not None:
        return False
    tensors, structure = _opened(batch)
    alone, structure_of_one = _opened(one)
    if structure != structure_of_one or not _agree(tensors, records) or not _agree(alone, 1):
        return False
    return any(isinstance(x, Tensor) and x.dim() for x in tensors)


def sizes_agree(batch: Any, records: int) -> bool:
    """Whether dimension 0 of all tensors of a batch is as long as it has records."""
    know_as_tree(batch)
    return _agree(tree_leaves(batch), records)


def _opened(batch: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a batch; a list without tensors, such as texts, is a leaf."""
    know_as_tree(batch)

    def is_plain(x: Any) -> bool:
        return isinstance(x, list | tuple) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))

    return tree_flatten(batch, is_leaf=is_plain)


def _agree(leaves: list[Any], records: int) -> bool:
    return all(len(x) == records for x in leaves if isinstance(x, Tensor | np.ndarray) and x.ndim)
