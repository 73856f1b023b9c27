"""Collation of records to a batch with rows that are made of one record each.

A row that is made of several records (mixup, cutmix, batch statistics), and a record that fills the places of others,
move a sum by more than the bound. So a `collate_fn` is never given several records of a private training together: it
is called with a list of one for each, and the results are joined here. It is given more only to see whether copies of
one record become rows, and which number it pads with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from dpbench.data import _joining as joining
from dpbench.data.records import Collated
from dpbench.data.separate_records import SeparateRecords
from dpbench.data.trees import unopened
from dpbench.errors import ConfigurationError, brief

RecordOfRow = str | Callable[[Any], Any]
_SHORT = "a"
_LONG = "a " * 16


class Collation:
    """Collates as torch does, and also makes batches without records.

    Args:
        dataset: Data set of the records; one of them shows the shapes.
        collate_fn: Function as for `torch.utils.data.DataLoader`; None takes torch's.
        record_of_row: Name or function as for `PrivateDataLoader`.
        is_private: True if rows must be made of one record each.

    Attributes:
        may_separate: True if each record may be a batch of its own, where records make no rows.
    """

    may_separate = False
    _is_private = False

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[Any], Any] | None,
        record_of_row: RecordOfRow | None = None,
        is_private: bool = False,
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._rows = record_of_row
        self._separates: bool | None = None
        # No longer used: keys of seeded runs by user cover the attributes of a data set, and so of its collation.
        self._calls = 0
        if is_private:
            self._is_private = True
            self._paddings: dict[int, float] = {}

    @property
    def is_custom(self) -> bool:
        """Return whether the `collate_fn` is another one than torch's."""
        return self._collate is not default_collate

    def __call__(self, records: Any) -> Any:
        if isinstance(records, Collated) and not self.is_custom:
            return records.batch
        is_list = isinstance(records, list | Collated)
        if not is_list and (self._is_private or not self.is_custom):
            raise ConfigurationError(
                f"{type(self._dataset).__name__}.__getitems__ returns a {type(records).__name__}: torch's protocol "
                "is a list of samples. Return that, or dpbench.data.records.Collated(batch) for a whole batch."
            )
        if is_list and not records:
            return self._without_records()
        if not self._is_private:
            return self._collate(records)
        return self._by_record(list(records)) if self.is_custom else self._by_torch(records)

    def _without_records(self) -> Any:
        record = self._dataset[0]
        if self.may_separate and self.is_custom and not self._makes_rows(record):
            return SeparateRecords()
        return joining.emptied(self._collate([record]))

    def _by_torch(self, records: list[Any]) -> Any:
        """The batch that torch's function makes, which has a row of each record, or fails."""
        try:
            return self._collate(records)
        except Exception as error:  # ragged records
            if not self.may_separate:
                raise
            try:
                return SeparateRecords([self._alone(record) for record in records])
            except ConfigurationError:
                raise error from None

    def _by_record(self, records: list[Any]) -> Any:
        """The rows of each record, or a batch of each."""
        batches = [self._alone(copy.copy(record)) for record in records]
        batch = self._joined(records, batches) if self._makes_rows(records[0]) else None
        if batch is not None:
            return batch
        if self.may_separate:
            return SeparateRecords(batches)
        batch = self._collate(records)
        if self._rows is not None or set(joining.sizes_of(batch)) == {len(records)}:
            closed = unopened(batch)
            cause = "the collate_fn returns values shared by all records, or pads with more than one number at the end"
            if closed is not None:
                cause = f"the batch contains a {closed}, whose tensors cannot be found"
            raise ConfigurationError(
                f"cannot build each row of a batch from one record: {cause}. Let the collate_fn build each row from "
                "one record alone, in tensors, and pad at the end (torch.nn.utils.rnn.pad_sequence, "
                "padding_side='right')."
            )
        return batch  # which has no rows

    def _alone(self, record: Any) -> Any:
        try:
            return self._collate([record])
        except Exception as error:
            raise ConfigurationError(
                f"the collate_fn fails on a list of one record, and each record is collated alone: {brief(error)}. "
                "Let it accept a list of one. Remove records that cannot be read (torch.utils.data.Subset), or replace "
                "them by empty ones, such as zeros."
            ) from error

    def _makes_rows(self, record: Any) -> bool:
        """Return whether copies of a record become rows of one batch; tried once."""
        if self._separates is None:
            with isolate_rng(include_cuda=False):
                one = self._alone(copy.deepcopy(record))
                pair = self._together(record, record)
            rows = self._number_of_rows(one)
            expected = joining.joined([one, one], [rows, rows], lambda place, column: None)
            is_known = expected is not None and unopened(one) is None and bool(joining.sizes_of(one))
            self._separates = not is_known or not joining.is_alike(expected, pair)
        return not self._separates

    def _together(self, *records: Any) -> Any:
        """The batch of copies of some records; None if there is none."""
        try:
            return self._collate([copy.deepcopy(record) for record in records])
        except Exception:
            return None

    def _number_of_rows(self, batch: Any) -> int:
        return 1 if self._rows is None else max(joining.sizes_of(batch), default=0)

    def _joined(self, records: list[Any], batches: list[Any]) -> Any:
        """The batch of all records' rows; None if they make none."""

        def ask_for_padding(place: int, column: Sequence[Tensor]) -> float | None:
            if place not in self._paddings:
                sizes = [one.shape[1:].numel() for one in column]
                self._learn_paddings(records[int(np.argmax(sizes))], records[int(np.argmin(sizes))])
            return self._paddings.get(place)

        rows = [self._number_of_rows(batch) for batch in batches]
        index = self._rows
        if index is not None:
            batches = [_numbered(batch, index, number) for number, batch in enumerate(batches)]
        batch = joining.joined(batches, rows, ask_for_padding)
        if index is not None and batch is not None:
            _check_index(index, batch, np.repeat(np.arange(len(rows)), rows))
        return batch

    def _learn_paddings(self, large: Any, small: Any) -> None:
        """See how made-up records of these sizes are padded: the numbers of no record become padding of others.

        Twice, with other numbers: a value that follows from a record's numbers is no padding.
        """
        candidates = []
        for offset in (0, 1):
            try:
                own = joining.made_up(small, _SHORT, offset)
                other = joining.made_up(large, _LONG, offset)
            except TypeError:  # such as an image of PIL
                return
            with isolate_rng(include_cuda=False):
                alone = self._together(own)
                pair = self._together(other, own)
            if alone is None or pair is None:
                return
            candidates.append(joining.paddings_between(alone, pair))
        self._paddings |= dict(candidates[0].items() & candidates[1].items())


def _index_of(index: RecordOfRow, batch: Any) -> Any:
    """Entry of a batch that holds the record of each row; None if there is none."""
    try:
        return batch[index] if isinstance(index, str) else index(batch)
    except Exception:  # refused where rows are counted
        return None


def _numbered(batch: Any, index: RecordOfRow, number: int) -> Any:
    """The batch of a record with the record's number as that of each row."""
    entry = _index_of(index, batch)
    if entry is None:
        return batch

    def change(leaf: Any) -> Any:
        if leaf is not entry:
            return leaf
        return torch.full_like(leaf, number) if isinstance(leaf, Tensor) else [number] * len(leaf)

    return tree_map(change, batch, is_leaf=lambda x: x is entry)


def _check_index(index: RecordOfRow, batch: Any, expected: NDArray[np.int64]) -> None:
    """Refuse an index that names other records; an entry that is no index is refused where rows are counted."""
    entry = _index_of(index, batch)
    numbers = np.asarray(entry if isinstance(entry, Tensor | list) else ())
    is_index = numbers.shape == expected.shape and numbers.dtype.kind in "iu"
    if is_index and (numbers != expected).any():
        raise ConfigurationError(
            "record_of_row does not match the records of the rows: give the name of the batch's entry that holds, for "
            "each row, the position of its record in the collate_fn's list, or a function that returns this entry."
        )
