"""The records of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbench.data.separate_records import SeparateRecords
from dpbench.data.trees import unopened
from dpbench.errors import ConfigurationError

_ALONE = 'in automatic optimization without microbatches, gradients="auto" trains each record as its own batch'


def count_records(batch: Any) -> int:
    """Number of records in a batch: the common first dimension of its tensors, or of batches of one.

    Raises:
        ConfigurationError: There are no tensors, or they disagree.
    """
    if isinstance(batch, SeparateRecords):
        return len(batch)
    shapes = {}
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            shapes[leaf.shape[0]] = tuple(leaf.shape)
    if not shapes:
        raise ConfigurationError(_without_rows(batch))
    if len(shapes) > 1:
        listed = ", ".join(map(str, shapes.values()))
        raise ConfigurationError(
            f"dimension 0 of each tensor of a batch must be its records, but its tensors have the shapes {listed}: put "
            "what all records share (a mask, class weights, positions) into the module (register_buffer), or repeat it "
            "for each record (mask.expand(len(records), *mask.shape)); pad records of several lengths to one tensor "
            f"(torch.nn.utils.rnn.pad_sequence); {_ALONE}."
        )
    (rows,) = shapes
    return int(rows)


def _without_rows(batch: Any) -> str:
    """The line about a batch without a tensor that has rows."""
    closed = unopened(batch)
    if closed is not None:
        return (
            f"the batch contains a {closed}, whose tensors cannot be found and split into records: let the collate_fn "
            f"return tensors in dictionaries, lists, tuples or dataclasses; {_ALONE}."
        )
    kinds = {type(leaf).__name__ for leaf in tree_leaves(batch)}
    types = ", ".join(sorted(kinds)) or "nothing"
    return (
        f"the batch has no tensor with a row for each record (it contains {types}): convert arrays (torch.from_numpy) "
        "and texts (a tokenizer) to tensors in the collate_fn, or add torch.arange(len(records)) to the texts."
    )
