"""Examples by user: a data set with users as records."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from dpbench.data.collation import Collation
from dpbench.data.fetching import watched
from dpbench.data.records import RecordsOfExamples, count_of
from dpbench.errors import ConfigurationError, DataError


class UserDataset(RecordsOfExamples):
    """Users, each with examples of its own; an item is a user.

    Args:
        examples: Map-style data set of all users' examples.
        users: The user of each example: names or numbers, as many as there are examples.
        names: All users, also those without an example; None: those of the examples, sorted.
        collate_fn: Makes a batch of a list of examples, as for `torch.utils.data.DataLoader`.

    Attributes:
        names: Names of the users, in the order of their positions.
        collate_fn: The given function.

    Raises:
        ConfigurationError: Users and examples differ in number, or a user is not among the names.
    """

    unit = "user"
    source = (
        "records=Users(LocalTraining(lr=...)) among the options of the strategy (records=users on the command line)"
    )

    def __init__(
        self,
        examples: Dataset[Any],
        users: Sequence[Hashable] | NDArray[Any] | Tensor,
        names: Sequence[Hashable] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        column = _user_column(users)
        if column.shape != (count_of(examples),):
            raise ConfigurationError(
                f"there are {count_of(examples)} examples and {column.size if column.ndim < 2 else column.shape} "
                "users: give the user of each example, one by one."
            )
        user_of_example = column.tolist()
        self.names: list[Hashable] = sorted(set(user_of_example)) if names is None else list(names)
        places = {name: place for place, name in enumerate(self.names)}
        if len(places) != len(self.names):
            raise ConfigurationError("names contains a user twice: give each name once.")
        try:
            numbers = np.array([places[name] for name in user_of_example], dtype=np.int64)
        except KeyError as error:
            raise ConfigurationError(f"{error.args[0]!r} has examples, but is not in names: add it.") from None
        self._examples = examples
        self._source = examples
        self._order = np.argsort(numbers, kind="stable")
        self._ends = np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=len(self.names)))])
        self.collate_fn = collate_fn
        self._collate = Collation(examples, collate_fn)

    @classmethod
    def from_datasets(cls, datasets: Mapping[Hashable, Dataset[Any]], **options: Any) -> Self:
        """Users with a data set of examples each.

        Args:
            datasets: User's name → data set, which may be empty.
            **options: `collate_fn`.
        """
        sizes = [count_of(dataset) for dataset in datasets.values()]
        with_examples = [dataset for dataset, size in zip(datasets.values(), sizes, strict=True) if size]
        if not with_examples:
            raise ConfigurationError("no user has an example.")
        # By number first: names need not be of a kind that can be sorted.
        numbers = range(len(sizes))
        users = cls(ConcatDataset(with_examples), np.repeat(numbers, sizes), numbers, **options)
        users.names = list(datasets)
        return users

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"UserDataset({len(self)} users, {len(self._order)} examples)"

    @property
    def examples(self) -> Dataset[Any]:
        return self._examples

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of examples of each user, (users,)."""
        return np.diff(self._ends)

    def rows(self, user: int) -> NDArray[np.int64]:
        """Positions of a user's examples in `examples`."""
        return self._order[self._ends[user] : self._ends[user + 1]]

    def rows_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(self.rows(int(user)) for user in records)])

    def watch(self) -> None:
        self._source = watched(self._examples)

    def batch(
        self,
        user: int,
        chosen: Sequence[int] | NDArray[np.int64] | Tensor,
    ) -> Any:
        """Batch of some of a user's examples.

        Args:
            user: Position of the user.
            chosen: Positions among the user's examples.

        Raises:
            DataError: An example cannot be read.
        """
        positions = self.rows(user)[np.asarray(chosen, dtype=np.int64)].tolist()
        examples: Any = self._source
        try:
            several = hasattr(examples, "__getitems__")
            return self._collate(examples.__getitems__(positions) if several else [examples[i] for i in positions])
        except (ConfigurationError, DataError):
            raise
        except Exception as error:  # of a user's own data set, of shapes that differ
            raise DataError(
                f"examples of user {self.names[user]!r} cannot be batched: {' '.join(str(error).split())[:300]} Give "
                "all examples the same shape, or the UserDataset a collate_fn that pads them."
            ) from error

    def subset(self, users: Sequence[int] | NDArray[np.int64]) -> UserDataset:
        """Some users with all of their examples, such as held-out ones.

        Args:
            users: Positions, each once.

        Raises:
            ConfigurationError: A user occurs twice among them.
        """
        if len(users) and np.asarray(users).dtype.kind not in "iu":
            raise ConfigurationError(
                f"subset takes positions of users, not names: {users[0]!r}; see UserDataset.names."
            )
        positions = np.arange(len(self))[np.asarray(users, dtype=np.int64)]
        if len(np.unique(positions)) < len(positions):
            raise ConfigurationError(
                "the subset contains a user twice: epsilon protects one item of the data set, and a user with two "
                "items is protected less. Name each user once."
            )
        subset = copy.copy(self)
        subset.names = [self.names[position] for position in positions]
        subset._order = self.rows_of(positions)
        subset._ends = np.concatenate([[0], np.cumsum(self.sizes[positions], dtype=np.int64)])
        return subset


def _user_column(users: Sequence[Hashable] | NDArray[Any] | Tensor) -> NDArray[Any]:
    """The user of each example as an array that can be sorted.

    Raises:
        ConfigurationError: A user is missing, or users are named in several ways.
    """
    names = users.tolist() if isinstance(users, np.ndarray | Tensor) else list(users)
    if any(name is None or (isinstance(name, float) and math.isnan(name)) for name in names):
        raise ConfigurationError("some examples have no user (None, NaN): remove them, or name their user.")
    kinds = sorted({type(name).__name__ for name in names})
    if len(kinds) > 1:
        raise ConfigurationError(
            f"users are named in several ways ({', '.join(kinds)}): name all by words, or by numbers."
        )
    return np.array(names)
