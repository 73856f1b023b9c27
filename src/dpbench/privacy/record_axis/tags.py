"""Tags on memory: which bytes belong to which record of a batch.

A tag lies on a tensor's storage, not on the tensor. Whatever shares the memory (views, `.data`, `detach`, `as_strided`,
tensors that autograd has saved) is covered by geometry, and needs no rule.
"""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ATTRIBUTE = "_dpbench_records"
_PACKAGE = Path(os.path.abspath(__file__)).parents[2]
_FOLDERS = (Path(torch.__file__).parent, _PACKAGE / "privacy", _PACKAGE / "guards")
HIDDEN = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
"""Folders with lines that are not named: the line that called them is."""


class Axis(NamedTuple):
    """A dimension that runs over the R records of a batch: index = (outer index · R + record) · inner + inner index.

    Attributes:
        dim: The dimension.
        outer: Number of repetitions of all records.
        inner: Number of neighboring rows of one record.
    """

    dim: int
    outer: int = 1
    inner: int = 1


_ROWS = Axis(0)


class Place(NamedTuple):
    """A line of code.

    Attributes:
        file: Path of the source file.
        line: Line number, from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        """The line, by a path from the working directory or from where packages lie."""
        file = self.file.replace(os.sep, "/")
        _, is_installed, of_package = file.rpartition("/site-packages/")
        if is_installed:
            file = of_package
        elif file.startswith(os.getcwd().replace(os.sep, "/") + "/"):
            file = os.path.relpath(file)
        return f"{file}:{self.line}"


def calling_line() -> Place:
    """The line of code, outside of torch and this package, that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(HIDDEN) and not file.startswith("<"):
            break
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


UNKNOWN = Place("?", 0)
"""Place of an event without a known line of code."""


class Rows(NamedTuple):
    """Memory in which byte b belongs to record ((b - base) // run) mod R.

    Attributes:
        batch: Number of the batch.
        run: Bytes of one record that lie side by side.
        records: R.
        base: Byte at which a run of record 0 starts.
        is_private: False for public numbers that are exchangeable along the records: draws and constants.
        is_random: True for public numbers of which some were drawn.
    """

    batch: int
    run: int
    records: int
    base: int
    is_private: bool = True
    is_random: bool = False


class Lone(NamedTuple):
    """Memory that depends on the only record of its batch.

    Attributes:
        batch: Number of the batch.
    """

    batch: int


class Over(Enum):
    """How the terms of all records are combined."""

    SUM = "sum"
    MEAN = "mean"


class Total(NamedTuple):
    """A sum or mean over all records of a function of each, as a loss may be.

    Attributes:
        batch: Number of the batch.
        over: Sum or mean.
    """

    batch: int
    over: Over


class Mixed(NamedTuple):
    """Memory in which records cannot be told apart.

    Attributes:
        batch: Number of the batch.
        place: The line that mixed them.
        operator: Name of the ATen operator.
        reason: The cause, in words.
        is_kept: True where records of an earlier batch are among them.
    """

    batch: int
    place: Place
    operator: str
    reason: str
    is_kept: bool = False


class Exchangeable(NamedTuple):
    """Public memory that is exchangeable along each dimension: a draw, or one constant.

    Attributes:
        batch: Number of the batch.
        is_random: True for draws.
        is_part: True if they come from one position of draws that may be one for each record.
    """

    batch: int
    is_random: bool = False
    is_part: bool = False


class Joint(NamedTuple):
    """Public numbers that each depend on draws for several records, such as noise minus its mean.

    Attributes:
        batch: Number of the batch.
    """

    batch: int


class Unwritten(NamedTuple):
    """Memory that no operator has written: its values come from code that is not seen.

    Attributes:
        batch: Number of the batch.
    """

    batch: int


class Local(NamedTuple):
    """Public memory that was made in this batch.

    Attributes:
        batch: Number of the batch.
    """

    batch: int


Tag = Rows | Lone | Total | Mixed | Exchangeable | Joint | Unwritten | Local
_PRIVATE = frozenset([Lone, Total, Mixed])
"""Tags of memory that depends on records, beside private `Rows`."""

_has_plain_memory: dict[type, bool] = {}


def has_plain_memory(t: Tensor) -> bool:
    """True if elements of a tensor are bytes of its storage; not of sparse, nested and wrapping tensors."""
    kind = type(t)
    is_plain = _has_plain_memory.get(kind)
    if is_plain is None:
        dispatch = kind.__torch_dispatch__
        is_plain = dispatch in (Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
        _has_plain_memory[kind] = is_plain
    return is_plain and t.layout is torch.strided and not t.is_quantized


def tag_of(t: Tensor) -> Any:
    """The tag of a tensor's memory, or None."""
    return getattr(t.untyped_storage(), _ATTRIBUTE, None)


def is_of_records(t: Tensor) -> bool:
    """True if a tensor's memory depends on records, as its tag says; others have no memory to tag."""
    return has_plain_memory(t) and is_private(tag_of(t))


def tag_of_storage(storage: torch.UntypedStorage) -> Any:
    """The tag of memory, or None."""
    return getattr(storage, _ATTRIBUTE, None)


def set_tag(t: Tensor, tag: Tag | None) -> None:
    """Set the tag of all memory that a tensor shares."""
    setattr(t.untyped_storage(), _ATTRIBUTE, tag)


def covers_storage(t: Tensor) -> bool:
    """True if each byte of a tensor's storage is an element of the tensor."""
    if t.numel() * t.element_size() != t.untyped_storage().nbytes():
        return False
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps_itself(t: Tensor) -> bool:
    """True if elements at several places are the same memory, other than by repeating along a dimension."""
    extent = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if stride == 0 or size == 1:
            continue
        if stride <= extent:
            return True
        extent += (size - 1) * stride
    return False


def is_private(tag: Any) -> bool:
    """True if memory with this tag depends on records."""
    kind = type(tag)
    return kind in _PRIVATE or (kind is Rows and tag.is_private)


def arrangement(t: Tensor, rows: Rows) -> Axis | None:
    """Read off strides where a tensor has its records.

    Args:
        t: A tensor on storage with the tag `rows`.
        rows: The tag.

    Returns:
        The dimension of all records; None if it has some of them only, or in another order.
    """
    run = rows.run
    period = run * rows.records
    size_of_element = t.element_size()
    shape = t.shape
    strides = t.stride()
    offset = int(t.storage_offset()) * size_of_element - rows.base
    if offset < 0:
        return None
    is_plain = not offset and shape and shape[0] == rows.records > 1 and strides[0] * size_of_element == run
    if is_plain and t.is_contiguous():
        return _ROWS  # as most are
    first_run, extent = divmod(offset, run)
    axis = None
    limit = run
    for dim, (size, elements) in enumerate(zip(shape, strides, strict=True)):
        stride = elements * size_of_element
        if size == 1 or stride % period == 0:
            continue  # the same place of the same record, or of another repetition
        if (size - 1) * stride < run:
            extent += (size - 1) * stride  # stays within the run, if all dimensions together do: see `limit`
        else:
            inner = run // stride if stride <= run and run % stride == 0 else 0
            if axis is not None or inner == 0 or first_run % rows.records or size % (rows.records * inner):
                return None
            axis = Axis(dim, size // (rows.records * inner), inner)
            limit = stride
    return axis if extent + size_of_element <= limit else None


def rows_of(t: Tensor, axis: Axis, batch: int, records: int) -> Rows | None:
    """The tag by which a tensor has its records along an axis, or None if its layout allows none.

    Args:
        t: A tensor with elements.
        axis: The dimension of the records.
        batch: Number of the batch.
        records: R.
    """
    if axis.dim >= t.dim():
        return None
    size_of_element = t.element_size()
    run = axis.inner * t.stride(axis.dim) * size_of_element
    if run <= 0:
        return None
    rows = Rows(batch, run, records, int(t.storage_offset()) * size_of_element)
    if not axis.dim and axis.outer == 1 < records and t.shape[0] == records * axis.inner and t.is_contiguous():
        return rows  # as most are
    return rows if arrangement(t, rows) == axis else None


def whole(rows: Rows) -> Rows:
    """The tag of a part of memory for all of it."""
    start = rows.base % (rows.run * rows.records)
    return rows._replace(base=start if start >= rows.run else 0)
