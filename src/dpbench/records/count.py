"""What of a batch are its records."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import ConfigurationError


def count_records(batch: Any) -> int:
    """Number of records in a batch: the common first dimension of its tensors, or of batches of one.

    Raises:
        ConfigurationError: There are no tensors, or they disagree.
    """
    if isinstance(batch, SeparateRecords):
        return len(batch)
    sizes = set()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            sizes.add(leaf.shape[0])
    if len(sizes) != 1:
        raise ConfigurationError(
            f"the tensors of a batch must agree on dimension 0, the records; found {sorted(sizes) or 'no tensors'}."
        )
    return int(sizes.pop())
