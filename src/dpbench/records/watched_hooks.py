"""Hooks that see a batch before the training step does, under the record axis."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from dpbench.data.trees import know_as_tree
from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.record_axis.host import watched
from dpbench.privacy.record_axis.mode import RecordAxis
from dpbench.privacy.record_axis.tags import Axis, Mixed, covers_storage, has_plain_memory
from dpbench.privacy.record_axis.verdict import new_axis
from dpbench.records.step_state import PublicState
from dpbench.records.tagging import tagged
from dpbench.records.training import Training

_MIXES = (
    "{name} mixes the records of a batch before training_step ({place}), so clipping does not bound the influence of "
    "one record: transform each record by itself, in the data set, say."
)
_READS = (
    "{name} reads values of records ({event}), so one record may affect how others are treated: transform each record "
    "by itself, with tensor operations or in the data set."
)


def transfer(name: str, hook: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The batch as a hook returns it, with each record in its own rows.

    Args:
        name: The hook's name.
        hook: The hook, which takes a batch and returns another.
        batch: Batch with records in dimension 0.
        *args: Further arguments of the hook.
        **kwargs: Further arguments of the hook.

    Raises:
        UnsupportedModuleError: The hook combines records, or reads values of records into Python.
    """
    rows = _rows(batch)
    if rows < 2:
        return hook(batch, *args, **kwargs)
    axis = new_axis(rows)
    batch = tagged(axis, batch)
    before = len(axis.reads)  # what lies in the batch itself is judged in the step
    with watched(axis), axis:
        transferred = hook(batch, *args, **kwargs)
    if len(axis.reads) > before:
        raise UnsupportedModuleError(_READS.format(name=name, event=axis.reads[before]))
    _refuse_mixed(axis, name, transferred)
    return transferred


def look_on(name: str, hook: Callable[..., Any], training: Training, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a hook that may change the batch in place, or set attributes, and return its result.

    An attribute that is made of records is refused once the loss depends on it. Changes of attributes after the hook
    has read a value of records are undone.

    Args:
        name: The hook's name.
        hook: The hook, which takes a batch.
        training: The training.
        batch: Batch with records in dimension 0.
        *args: Further arguments of the hook.
        **kwargs: Further arguments of the hook.

    Raises:
        UnsupportedModuleError: The hook combines records in the batch.
    """
    rows = _rows(batch)
    if rows < 2:
        return hook(batch, *args, **kwargs)
    axis = new_axis(rows)
    states: list[PublicState] = []
    axis.before_first_read = lambda: states.append(PublicState(training))
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and has_plain_memory(leaf) and leaf.dim():
            if not covers_storage(leaf):
                leaf.data = (
                    leaf.clone()
                )  # the batch is the hook's, so that the tensor itself moves out of others' memory
            axis.tag(leaf, Axis(0, 1, 1))
    with watched(axis), axis:
        returned = hook(batch, *args, **kwargs)
    for state in states:
        state.put_back()
    _refuse_mixed(axis, name, batch)
    return returned


def apart() -> AbstractContextManager[Any]:
    """Within, a step that a hook calls is not seen as a part of the hook: it is judged by itself."""
    is_watched = any(isinstance(mode, RecordAxis) for mode in _get_current_dispatch_mode_stack())
    return _disable_current_modes() if is_watched else nullcontext()


def _rows(batch: Any) -> int:
    """Rows of a batch with tensors that agree; 0 otherwise, which is refused or run record by record."""
    know_as_tree(batch)
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def _refuse_mixed(axis: RecordAxis, name: str, batch: Any) -> None:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.numel():
            place = axis.place_of(leaf)
            if place not in (None, Axis(0, 1, 1)):
                where = f"{place.place}: {place.reason}" if isinstance(place, Mixed) else "rows that are no records"
                raise UnsupportedModuleError(_MIXES.format(name=name, place=where))
