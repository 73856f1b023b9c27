"""How the records of a lot become a batch, and what is refused of a `collate_fn` on the way.

A row that is made of several records (mixup, cutmix, batch statistics), and a record that fills the places of others,
move a sum by more than the bound. Both show in some lots, of which records are collated again with others in the places
of half of them; and in each lot a tensor of a record may be joined with others again in rows of the record only.
Nothing is said of a `collate_fn` that fails, or that is random beyond the seeds of torch, numpy and `random`. A data
set that returns None for an item is refused.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, default_collate

from dpbench.data.octaves import is_checked
from dpbench.data.records import Collated
from dpbench.data.separate_records import SeparateRecords, has_rows, sizes_agree
from dpbench.data.trees import know_as_tree
from dpbench.errors import ConfigurationError, brief

Rows = Callable[[Any, NDArray[np.int64], int], NDArray[np.int64]]
"""Rows of a batch that some records, named by their positions, have; and the number of all records in it."""
Collate = Callable[[Any], Any]

_FEW = 2  # records that say nothing of the others
_MOST = 32  # records that are collated again
_STAND_INS = 2  # of them, each in the place of all others
_RELATIVE = 1e-4  # difference that rounding makes
_ABSOLUTE = 1e-6
# How the rows of some records compare in two batches.
_SAME = "same"
_SORTED = "sorted"
_MIXED = "mixed"


class Collation:
    """Collates as torch does, and knows what an empty lot looks like.

    Args:
        dataset: Of which one record shows the shapes.
        collate_fn: As for `torch.utils.data.DataLoader`; None takes torch's.
        rows: Rows of a record in a batch, where records must not be mixed; None: they may.

    Attributes:
        ordered: Whether the order of rows matters, too.
        may_separate: Whether records may be collated alone, where those of a lot make no rows.
    """

    ordered = False
    may_separate = False

    def __init__(
        self,
        dataset: Dataset[Any],
        collate_fn: Callable[[Any], Any] | None,
        rows: Rows | None = None,
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._rows = rows
        self._calls = 0
        self._separates: bool | None = None

    @property
    def is_custom(self) -> bool:
        """Whether the `collate_fn` is another one than torch's."""
        return self._collate is not default_collate

    def __call__(self, records: Any) -> Any:
        if not self.is_custom:
            if isinstance(records, Collated):
                return records.batch
            if not isinstance(records, list):
                raise ConfigurationError(
                    f"{type(self._dataset).__name__}.__getitems__ returns a {type(records).__name__}: torch's protocol "
                    "is a list of samples. Return that, or dpbench.data.records.Collated(batch) for a whole batch, or "
                    "give a collate_fn."
                )
        if self.may_separate and isinstance(records, list):
            return self._rows_or_separate(records)
        return self._together(records)

    def _together(self, records: Any) -> Any:
        """The batch of all records of a lot."""
        if isinstance(records, list) and not records:
            record = self._dataset[0]
            return _emptied(self._collate([record]), self._collate([record, record]))
        if self._rows is not None and self.is_custom:
            return self._checked(records, self._rows)
        return self._collate(records)

    def _rows_or_separate(self, records: list[Any]) -> Any:
        """The batch of a lot where records are its rows, else a batch of each record."""
        if self._separates is None:
            # Torch's makes rows, or fails.
            self._separates = self.is_custom and not self._makes_rows(records)
        if self._separates:
            return self._separate(records)
        before = [copy.copy(record) for record in records] if self.is_custom else records
        try:
            batch = self._together(records)
        except ConfigurationError:
            raise
        except Exception as error:  # ragged records, or a fault of its own
            try:
                return self._separate(before)
            except ConfigurationError:
                raise error from None
        if self.is_custom and not sizes_agree(batch, len(records)):
            return self._separate(before)
        return batch

    def _makes_rows(self, records: list[Any]) -> bool:
        """Whether a batch of two records has a row for each; asked once."""
        two = records[:2]
        if len(two) < 2:  # nothing can be told of one
            with random_numbers_kept():
                two = [self._dataset[0]] * 2
        try:
            batch_of_one = collated(self._collate, two[:1])
        except Exception:
            return True  # the lot itself says what is wrong
        try:
            batch = collated(self._collate, two)
        except Exception:
            return False
        return has_rows(batch, 2, batch_of_one)

    def _separate(self, records: list[Any]) -> SeparateRecords:
        """A batch of each record."""
        try:
            return SeparateRecords([self._collate([record]) for record in records])
        except Exception as error:
            raise ConfigurationError(
                "the records cannot be rows of one batch, so each is collated alone, but the collate_fn fails on a "
                f"list of one: {brief(error)}. Let it make one row for each record, or accept a list of one record."
            ) from error

    def _checked(self, records: Any, rows: Rows) -> Any:
        """The batch of a collate_fn that must not mix records, nor repeat one."""
        if isinstance(records, list) and any(record is None for record in records):
            raise ConfigurationError(
                f"{type(self._dataset).__name__} returns None for an item: a collate_fn that fills its place with "
                "another record gives that several rows, each clipped separately. Remove items that cannot be read "
                "(torch.utils.data.Subset), or return an empty record for them, such as zeros."
            )
        self._calls += 1
        if len(records) > _FEW and is_checked(self._calls):
            refuse_mixing(self._collate, records, self._calls, rows, self.ordered)
        if not isinstance(records, list):
            return self._collate(records)
        places: dict[int, int] = {}
        own = [_apart(record, number, places) for number, record in enumerate(records)]
        joins = _Joins(places)
        with joins:
            batch = self._collate(own)
        if any(_is_misplaced(join, rows, batch, len(records)) for join in joins.repeated):
            raise ConfigurationError(
                "the collate_fn puts a record into a batch again, in a row that is not its own, as those do that fill "
                "the places of others: each is clipped separately, or counted for another record, and epsilon does "
                "not hold. Remove records that cannot be used from the data set (torch.utils.data.Subset), or make an "
                "empty row for each of them, such as zeros; with record_of_row, stack rows in their order, or use "
                "repeat_interleave."
            )
        return batch


class _Join(NamedTuple):
    """Tensors that one call has joined, some of them more than once.

    Attributes:
        rows: Number of rows that come of them; None if they are not joined as rows.
        places: Record → rows of its tensors that were joined more than once.
    """

    rows: int | None
    places: Mapping[int, Sequence[int]]


def _is_misplaced(join: _Join, rows: Rows, batch: Any, records: int) -> bool:
    """Tell if a tensor that was joined again is in a row that is not its record's."""
    try:
        if join.rows != len(rows(batch, np.arange(records), records)):
            return True
        own = {record: rows(batch, np.array([record]), records) for record in join.places}
    except Exception:  # no index of records, which is refused with the batch
        return False
    return not all(set(places) <= set(own[record].tolist()) for record, places in join.places.items())


class _Joins(TorchFunctionMode):
    """Take note of tensors of records that are joined with others again: whoever fills places does so.

    Args:
        places: Address of each tensor of a record → the record's number.

    Attributes:
        repeated: Calls that join a tensor more than once.
    """

    def __init__(self, places: Mapping[int, int]) -> None:
        super().__init__()
        self._places = places
        self.repeated: list[_Join] = []

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        for values in (*args[:1], *kwargs.values()):
            if isinstance(values, list | tuple):
                is_by_row = function in (torch.stack, torch.cat) and kwargs.get("dim", (*args, 0, 0)[1]) == 0
                self._look_at(values, function is torch.cat, is_by_row)
        return function(*args, **kwargs)

    def _look_at(self, values: Sequence[Any], is_cat: bool, is_by_row: bool) -> None:
        tensors = [x for x in values if isinstance(x, Tensor) and _has_memory(x)]
        addresses = [x.data_ptr() for x in tensors]
        joined = Counter(address for address in addresses if address in self._places)
        # A record may be joined with itself, as a picture's three channels.
        if len({self._places[address] for address in joined}) < 2 or max(joined.values()) < 2:
            return
        places: dict[int, list[int]] = {}
        row = 0
        for x, address in zip(tensors, addresses, strict=True):
            size = len(x) if is_cat and x.dim() else 1
            if joined[address] > 1:
                places.setdefault(self._places[address], []).extend(range(row, row + size))
            row += size
        self.repeated.append(_Join(row if is_by_row else None, places))


def _has_memory(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_meta and x.numel() > 0


def _apart(record: Any, number: int, places: dict[int, int]) -> Any:
    """A record whose tensors and arrays lie where no other record's do; their addresses are added to `places`."""

    def apart(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not _has_memory(leaf):
            return leaf
        place = leaf.data_ptr() if isinstance(leaf, Tensor) else leaf.ctypes.data
        if place in places:
            leaf = leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
            place = leaf.data_ptr() if isinstance(leaf, Tensor) else leaf.ctypes.data
        places[place] = number
        return leaf

    return tree_map_only((Tensor, np.ndarray), apart, record)


def _emptied(one: Any, two: Any) -> Any:
    """A batch without records, from one of one record and one of two: what grows with the records becomes empty."""
    if getattr(one, "shape", ()):
        return one[:0]
    if isinstance(one, UserDict | dict):
        entries = {key: _emptied(value, two[key]) for key, value in one.items()}
        return type(one)(entries) if isinstance(one, UserDict) else entries
    if is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in fields(one)]
        return replace(one, **{name: _emptied(getattr(one, name), getattr(two, name)) for name in names})
    if isinstance(one, list | tuple):
        if len(one) != len(two):  # an entry for each record, such as its text
            return type(one)()
        parts = list(map(_emptied, one, two))
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    return one


def rows_of(
    record_of_row: Any,
    batch: Any,
    records: NDArray[np.int64],
    number: int,
) -> NDArray[np.int64]:
    """Rows of some records, by `LotLoader`'s `record_of_row`; without one each record is a row."""
    if record_of_row is None:
        return records
    owners = np.asarray(batch[record_of_row] if isinstance(record_of_row, str) else record_of_row(batch))
    count = max(map(len, _tensors(batch)))
    is_index = owners.dtype.kind in "iu" and owners.shape == (count,)
    if not is_index or (np.diff(owners) < 0).any() or (owners < 0).any() or (owners >= number).any():
        raise ValueError("no index of records")
    return np.flatnonzero(np.isin(owners, records))


def collated(collate: Collate, records: list[Any]) -> Any:
    """Collate copies of some records, with the random numbers that come next; they come again."""
    with random_numbers_kept():
        return collate([copy.deepcopy(record) for record in records])  # one that stands twice is two


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Let random numbers of torch, numpy and `random` be drawn that come again afterwards, after a failure too.

    Lightning's `isolate_rng` does not put them back where an exception passes.
    """
    of_torch = torch.get_rng_state()
    of_numpy = np.random.get_state()
    of_python = random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def _tensors(batch: Any) -> list[Tensor]:
    """Tensors of a batch that may have rows."""
    know_as_tree(batch)
    return [leaf.detach() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


# ------------------------------------------------------------------------------------------------- rows of several


def refuse_mixing(
    collate: Collate,
    records: Sequence[Any],
    number: int,
    rows: Rows,
    ordered: bool = False,
) -> None:
    """Collate some records again among others, with the same random numbers: the rows of a record must be the same.

    Args:
        collate: The `collate_fn`; it is given copies.
        records: Of a lot.
        number: Chooses among them.
        rows: Rows of a record.
        ordered: Whether rows must come in the order of their records, because it says which microbatch is whose.

    Raises:
        ConfigurationError: They depend on the other records, or come in an order that does.
    """
    try:
        verdict = _how_it_mixes(collate, records, number, rows, ordered)
    except Exception:  # the lot itself says what is wrong
        return
    if verdict == _SORTED:
        raise ConfigurationError(
            "the collate_fn reorders the records of a batch, but with microbatch_size the position of a row determines "
            "its microbatch: one record would move others into other microbatches. Keep the order "
            "(pack_padded_sequence(..., enforce_sorted=False) takes any), or leave microbatch_size at 1."
        )
    if verdict == _MIXED:
        raise ConfigurationError(
            "the collate_fn builds rows of a record from other records (mixup, cutmix, batch statistics, a number of "
            "the whole batch), or record_of_row names other records: clipping then does not bound the influence of "
            "one record. Build each row from one record alone."
        )


def _how_it_mixes(
    collate: Collate,
    records: Sequence[Any],
    number: int,
    rows: Rows,
    ordered: bool,
) -> str:
    """What a `collate_fn` does to the rows of half of some records where the other half changes."""
    rng = np.random.default_rng(number)
    sample = [records[i] for i in rng.permutation(len(records))[:_MOST]]
    count = len(sample)
    watched, changed = (np.sort(half) for half in np.array_split(rng.permutation(count), 2))
    moved = np.arange(count)
    moved[changed] = np.roll(changed, 1)  # the same records: texts are padded to the same length
    replaced = np.arange(count)
    replaced[changed] = 0
    batch = collated(collate, sample)
    repeated = collated(collate, sample)
    after_move = collated(collate, [sample[i] for i in moved])
    after_replacement = collated(collate, [sample[i] for i in replaced])
    own_rows = rows(batch, watched, count)

    def verdict_on(other: Any) -> str | None:
        verdict = _compare(batch, other, own_rows, rows(other, watched, count))
        return _MIXED if verdict == _SAME and _other_entries(batch, other, watched, count) else verdict

    verdicts = [verdict_on(after_move), verdict_on(after_replacement)]
    if verdict_on(repeated) != _SAME:
        return _SAME  # it is random beyond the seeds, and nothing can be said
    for record in sample[:_STAND_INS]:
        if _MIXED in verdicts or _other_numbers(batch, collated(collate, [record] * count), count):
            return _MIXED
    if ordered and (_SORTED in verdicts or _is_unmoved(batch, after_move, changed)):
        return _SORTED
    return _SAME


def _compare(
    one: Any,
    other: Any,
    rows: NDArray[np.int64],
    other_rows: NDArray[np.int64],
) -> str | None:
    """How some rows of two batches compare; None where they cannot be compared."""
    pairs = list(zip(_numbers(one), _numbers(other), strict=True))
    for a, b in pairs:
        if a.shape[1:] != b.shape[1:]:
            return None  # padded to another length
    if len(rows) == len(other_rows) and all(_close(a[rows], b[other_rows]).all() for a, b in pairs):
        return _SAME
    # Or sorted, as packed sequences are: then each row is still one that was there.
    matches = [_close(a[:, None], b[None]).reshape(len(a), len(b), -1).all(2) for a, b in pairs]
    has_match = torch.stack(matches).all(0).any(0)
    return _SORTED if has_match.all() else _MIXED


def _leaves(batch: Any, records: int) -> list[Any]:
    """Leaves of a batch; a list with an entry for each record, such as its length or its name, is one."""
    return tree_leaves(batch, is_leaf=lambda x: _is_of_records(x, records))


def _is_of_records(x: Any, records: int) -> bool:
    is_list = isinstance(x, list | tuple) and not hasattr(x, "_fields") and len(x) == records
    return is_list and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(x))


def _other_entries(one: Any, other: Any, records: NDArray[np.int64], count: int) -> bool:
    """Whether numbers of some records in such lists are in no place of the other batch, whose order may be another."""
    for a, b in zip(_leaves(one, count), _leaves(other, count), strict=True):
        if _is_of_records(a, count):
            numbers = set(map(_numbers_of_entry, b))
            if any(_numbers_of_entry(a[i]) not in numbers for i in records):
                return True
    return False


def _numbers_of_entry(entry: Any) -> tuple[float, ...]:
    return tuple(round(float(leaf), 6) for leaf in tree_leaves(entry) if isinstance(leaf, int | float | np.number))


def _other_numbers(one: Any, other: Any, records: int) -> bool:
    """Whether numbers of two batches that belong to no record, such as a scale for all of them, differ."""
    scalars = _scalars(one, records)
    if not scalars:
        return False
    for a, b in zip(_tensors(one), _tensors(other), strict=True):
        if a.shape != b.shape:
            return False  # padded to another length, which such a number may be
    return not all(map(_close, scalars, _scalars(other, records)))


def _scalars(batch: Any, records: int) -> list[Tensor]:
    scalars = []
    for leaf in _leaves(batch, records):
        if isinstance(leaf, int | float) or (isinstance(leaf, Tensor | np.ndarray | np.number) and not leaf.ndim):
            scalars.append(torch.as_tensor(leaf).double())
    return scalars


def _is_unmoved(one: Any, other: Any, rows: NDArray[np.int64]) -> bool:
    """Whether a batch stayed as it was though some records, that differ, changed places."""
    pairs = list(zip(_numbers(one), _numbers(other), strict=True))
    if all(_close(a[rows], a[np.roll(rows, 1)]).all() for a, _ in pairs):
        return False  # the records are equal
    return all(a.shape == b.shape and _close(a, b).all() for a, b in pairs)


def _numbers(batch: Any) -> list[Tensor]:
    return [tensor.double() for tensor in _tensors(batch)]


def _close(a: Tensor, b: Tensor) -> Tensor:
    return torch.isclose(a, b, _RELATIVE, _ABSOLUTE, equal_nan=True)
