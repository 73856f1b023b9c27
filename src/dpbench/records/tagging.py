"""Tags of the tensors of a batch, and a step that is run under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dpbench.data.trees import know_as_tree, unopened
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.privacy.record_axis.host import watched
from dpbench.privacy.record_axis.mode import IN_BATCH, RecordAxis
from dpbench.privacy.record_axis.tags import (
    UNKNOWN,
    Axis,
    Mixed,
    Over,
    covers_storage,
    has_plain_memory,
    set_tag,
)
from dpbench.privacy.record_axis.verdict import Verdict, judge, new_axis

_COLLATE = "let the collate_fn return tensors in dictionaries, lists, tuples or dataclasses"


def tagged(axis: RecordAxis, batch: Any, rows_of_record: int = 1, index: object = None) -> Any:
    """Tag the tensors of a batch.

    Args:
        axis: The mode of the step.
        batch: Tensors with records in dimension 0, in lists, dictionaries or dataclasses; lists of R items are taken as
            an item of each record, which Python tells apart.
        rows_of_record: Neighboring rows that belong to one record.
        index: Key of the entry that counts the records; it tells their places, and is public.

    Returns:
        The batch; tensors that are a part of other memory are copied.
    """
    know_as_tree(batch)
    if isinstance(batch, dict) and isinstance(index, str) and index in batch:
        others = {key: value for key, value in batch.items() if key != index}
        return batch | _tagged(axis, others, rows_of_record)
    return _tagged(axis, batch, rows_of_record)


def under_tags(
    engine: GradientMethod,
    step: Callable[[Any], Any],
    batch: Any,
    rows: int,
    index: object = None,
) -> Any:
    """Run a step outside of the training, under tags where the engine needs them.

    Args:
        engine: The method that is about to compute gradients of the step's result.
        step: Batch → anything.
        batch: Batch in which each row is taken for a record.
        rows: Number of rows.
        index: See `tagged`.
    """
    if not isinstance(engine, PerRecordEngine) or not engine.needs_tags or not rows:
        return step(batch)
    axis = new_axis(rows)
    with watched(axis), axis:
        output = engine.within(step)(tagged(axis, batch, index=index))
    engine.axis = (axis, 1)
    return output


def _tagged(axis: RecordAxis, x: Any, inner: int) -> Any:
    if isinstance(x, Tensor):
        return _tagged_tensor(axis, x, inner)
    if isinstance(x, list) and len(x) == axis.records and not _are_rows(x, axis.records * inner):
        axis.note_read("list", f"{IN_BATCH} a list of values of records")
        return tree_map(lambda leaf: _tagged_leaf(axis, leaf, 0), x)  # no tensor has a row of each record
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(_tagged(axis, item, inner) for item in x)
    return tree_map(lambda leaf: _tagged_leaf(axis, leaf, inner), x)


def _tagged_leaf(axis: RecordAxis, leaf: Any, inner: int) -> Any:
    if isinstance(leaf, Tensor):
        return _tagged_tensor(axis, leaf, inner)
    closed = unopened(leaf)
    if closed is not None:
        axis.note_read(closed, f"{IN_BATCH} a {closed}, whose tensors cannot be found ({_COLLATE})")
    elif isinstance(leaf, np.ndarray):
        axis.note_read("ndarray", f"{IN_BATCH} an array of NumPy")
    return leaf


def _are_rows(items: list[Any], rows: int) -> bool:
    tensors = [leaf for leaf in tree_leaves(items) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(t.dim() and len(t) == rows for t in tensors)


def _tagged_tensor(axis: RecordAxis, t: Tensor, inner: int) -> Tensor:
    if not has_plain_memory(t):
        return t  # mixed, whatever is done with it
    if not covers_storage(t):
        t = t.clone()
    if axis.records == 1 or (t.dim() and len(t) == axis.records * inner):
        axis.tag(t, Axis(0, 1, inner))
    else:
        set_tag(t, Mixed(axis.batch, UNKNOWN, "", "the batch has rows that are no records"))
    return t


def watch(
    step: Callable[[Any], Any],
    batch: Any,
    records: int,
    rows_of_record: int = 1,
    over: Over = Over.MEAN,
    index: object = None,
) -> tuple[Any, Verdict]:
    """Run a training step on a batch, and judge its loss.

    Args:
        step: Batch → loss.
        batch: The batch, as for `tagged`.
        records: Number of records, R.
        rows_of_record: Neighboring rows that belong to one record.
        over: The loss is declared to be a mean, or a sum, over the records.
        index: See `tagged`.

    Returns:
        The output of the step, and the verdict.
    """
    axis = new_axis(records)
    batch = tagged(axis, batch, rows_of_record, index)
    with watched(axis), axis:
        output = step(batch)
    return output, judge(axis, output, over)
