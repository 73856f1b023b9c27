"""Joining batches of single records to one batch, with rows that are therefore made of one record each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpbench.data.trees import know_as_tree

AskForPadding = Callable[[int, Sequence[Tensor]], float | None]
"""(position of a leaf in the batch, the tensors of all records) → the number that is added at their ends, or None if it
is not known."""


def opened(batch: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a batch; a list without tensors, such as one of texts, is a leaf."""
    know_as_tree(batch)
    return tree_flatten(batch, is_leaf=_is_plain)


def sizes_of(batch: Any) -> list[int]:
    """First dimensions of the tensors in a batch."""
    return [len(leaf) for leaf in opened(batch)[0] if isinstance(leaf, Tensor) and leaf.dim()]


def joined(batches: Sequence[Any], rows: Sequence[int], ask_for_padding: AskForPadding) -> Any:
    """Join the batches of single records.

    Args:
        batches: A batch of each record.
        rows: Number of rows of each.
        ask_for_padding: Called for tensors of several sizes.

    Returns:
        A batch of all rows, in the order of the records; None if the batches have other rows or unlike contents.
    """
    columns = []
    structures = []
    for batch in batches:
        leaves, structure = opened(batch)
        columns.append(leaves)
        structures.append(structure)
    if any(structure != structures[0] for structure in structures):
        return None
    parts = []
    for place, column in enumerate(zip(*columns, strict=True)):
        if [_rows_in(leaf) for leaf in column] == list(rows):
            part = _joined_rows(place, column, ask_for_padding)
        else:
            is_shared = all(_shape_or_value(leaf) == _shape_or_value(column[0]) for leaf in column)
            part = column[0] if is_shared and _rows_in(column[0]) is None else None
        if part is None:
            return None
        parts.append(part)
    return tree_unflatten(parts, structures[0])


def is_alike(one: Any, other: Any) -> bool:
    """Return whether two batches have leaves of the same sizes, and the same numbers that belong to no row."""
    leaves, structure = opened(one)
    other_leaves, other_structure = opened(other)
    return structure == other_structure and all(
        _shape_or_value(a) == _shape_or_value(b) for a, b in zip(leaves, other_leaves, strict=True)
    )


def _joined_rows(place: int, column: Sequence[Any], ask_for_padding: AskForPadding) -> Any:
    if not isinstance(column[0], Tensor):
        return [entry for entries in column for entry in entries]
    if len({(one.dtype, one.dim()) for one in column}) > 1:
        return None
    if any(one.is_nested or one.layout is not torch.strided for one in column):
        return None
    shapes = {one.shape[1:] for one in column}
    if len(shapes) > 1:
        padding = ask_for_padding(place, column)
        if padding is None:
            return None
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        column = [padded(one, largest, padding) for one in column]
    return torch.cat(list(column))


def padded(one: Tensor, shape: Sequence[int], value: float) -> Tensor:
    """A record's rows, brought to a larger shape.

    Args:
        one: (rows, *sizes).
        shape: Sizes that are wanted, without that of the rows.
        value: The number that is added at the ends.
    """
    amounts: list[int] = []
    for size, wanted in zip(reversed(one.shape[1:]), reversed(shape), strict=True):
        amounts += [0, wanted - size]
    return F.pad(one, amounts, value=value)


def paddings_between(own: Any, pair: Any) -> dict[int, float]:
    """Find the paddings that bring the rows of one batch to the sizes of another batch, which ends with them.

    Args:
        own: The batch of a record alone.
        pair: The batch of a larger record and that one.

    Returns:
        Place of a leaf → the number, for tensors that are padded with one number at the end. Padding before a record's
        own numbers would move them where another record is larger.
    """
    leaves, structure = opened(own)
    others, other_structure = opened(pair)
    paddings: dict[int, float] = {}
    if structure != other_structure:
        return paddings
    for place, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        if not isinstance(leaf, Tensor) or not leaf.numel() or not leaf.dim() or other.dim() != leaf.dim():
            continue
        row = other[-len(leaf) :]
        if row.shape == leaf.shape or any(size > wanted for size, wanted in zip(leaf.shape, row.shape, strict=True)):
            continue
        is_own = padded(torch.ones_like(leaf, dtype=torch.bool), row.shape[1:], False)
        rest = row[~is_own]
        if len(rest) and torch.equal(row[is_own], leaf.flatten()) and bool((rest == rest[0]).all()):
            paddings[place] = rest[0].item()
    return paddings


def made_up(record: Any, text: str, offset: int) -> Any:
    """A record of the same sizes with numbers and words that say nothing of it.

    Args:
        record: Tensors, arrays, numbers and texts in dictionaries, lists and tuples.
        text: The text in place of each text.
        offset: Offset of the counts that take the place of several numbers.

    Raises:
        TypeError: It holds something else.
    """
    know_as_tree(record)
    return tree_map(lambda leaf: _made_up(leaf, text, offset), record, is_leaf=_is_numbers)


def _is_numbers(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(type(number) in (int, float) for number in x)


def _made_up(leaf: Any, text: str, offset: int) -> Any:
    if _is_numbers(leaf):
        return [type(number)((place + offset) % 100 + 1) for place, number in enumerate(leaf)]
    if isinstance(leaf, Tensor) and not leaf.dim():  # such as a label
        return torch.zeros_like(leaf)
    if isinstance(leaf, Tensor):
        return ((torch.arange(leaf.numel(), device=leaf.device) + offset) % 100 + 1).reshape(leaf.shape).to(leaf.dtype)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
        return ((np.arange(leaf.size) + offset) % 100 + 1).reshape(leaf.shape).astype(leaf.dtype)
    if isinstance(leaf, str):
        return text
    if leaf is None or isinstance(leaf, bool | int | float):
        return None if leaf is None else type(leaf)(0)
    raise TypeError(type(leaf).__name__)


def emptied(one: Any) -> Any:
    """A batch without records.

    Args:
        one: The batch of one record.
    """
    leaves, structure = opened(one)
    return tree_unflatten([leaf if _rows_in(leaf) is None else leaf[:0] for leaf in leaves], structure)


def _is_plain(x: Any) -> bool:
    is_list = isinstance(x, list | tuple) and not hasattr(x, "_fields")
    return is_list and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))


def _rows_in(leaf: Any) -> int | None:
    """Number of entries of a tensor or list; None for anything else."""
    has_rows = leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, list | tuple)
    return len(leaf) if has_rows else None


def _shape_or_value(leaf: Any) -> Any:
    """The shape of a tensor, the length of a list, or a number or text; for other objects, a value that equals none."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape) or leaf.item()
    if isinstance(leaf, list | tuple):
        return len(leaf)
    return leaf if isinstance(leaf, str | int | float | None) else object()
