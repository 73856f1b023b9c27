"""Base of data modules: batches to train on, a split that is held out, and loaders for both."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pytorch_lightning as pl
from numpy.typing import NDArray
from pydantic import Field
from pytorch_lightning.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset, Subset

from dpbench.data.collation import Collation, RecordOfRow
from dpbench.data.held_out import Split, membership_coins, parted
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import count_of
from dpbench.data.sampler import PrivateBatchSampler, check_scheme_of_members, make_sampling
from dpbench.data.sources import data_root
from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling import Positions, Sampling, find_scheme

Membership = Literal["half"]
Folder = Annotated[str, Field(min_length=1), "the path of a folder"]

ExamplesT = TypeVar("ExamplesT", bound=Dataset[Any])


class Splits(NamedTuple, Generic[ExamplesT]):
    """The data sets of a data module.

    Attributes:
        train: Data from which batches are drawn: the population of the ledger.
        val: Data held out of the training data; None: none.
        test: The test examples.
        members: True for each record of `train` that batches may contain, (N,); None: all.
    """

    train: ExamplesT
    val: ExamplesT | None
    test: ExamplesT
    members: NDArray[np.bool_] | None = None


class PrivateDataModule(pl.LightningDataModule, Generic[ExamplesT]):
    """Base of data modules with batches that a private strategy accepts; a subclass loads the data.

    Args:
        root: Folder of the data sets; None takes $DPBENCH_DATA, else a per-user cache folder.
        expected_batch_size: Mean number of records in a training batch.
        sampling: Kind of the sampling; None is "poisson".
        val_count: Records to hold out, their expected number with split="hash".
        eval_batch_size: Examples in a validation or test batch.
        download: True to download an absent data set.
        seed: Key of the batches; None takes the operating system's entropy.
        split: Choice of the records held out, see `data.held_out`.
        expected_batch_size_schedule: Schedule of the batch size over the steps; None: constant.
        membership: "half": an experiment on membership, in which each training record is trained on by a fair coin of
            its own, a function of `seed` and of the record's content, see `held_out.membership_coins`. Sampling rate,
            divisor and ledger stay those of all records. None: every record is trained on.

    Attributes:
        name: Name of the data set.
        unit: Unit of the records.
    """

    name: str
    unit: str = "example"
    _val_option = "val_size"
    _records = "records"

    def __init__(
        self,
        root: str | None,
        expected_batch_size: float,
        sampling: str | None,
        val_count: int,
        eval_batch_size: int,
        download: bool,
        seed: int | None,
        split: Split,
        expected_batch_size_schedule: str | list[float] | None,
        membership: Membership | None = None,
    ) -> None:
        super().__init__()
        self.root = data_root(root)
        self._expected_batch_size = expected_batch_size
        self._sampling_kind = "poisson" if sampling is None else sampling
        self._val_count = val_count
        self._eval_batch_size = eval_batch_size
        self._download = download
        self._seed = seed
        self._split = split
        self._size_schedule = expected_batch_size_schedule
        self._membership = membership
        self._splits: Splits[ExamplesT] | None = None
        self._identities: list[bytes] = []

    @abstractmethod
    def _load(self) -> Splits[ExamplesT]:
        """Load everything; called once."""

    @property
    def _collate_fn(self) -> Callable[[Any], Any] | None:
        """Makes a batch of examples; None: as torch does."""
        return None

    def _hold_out(
        self,
        sizes: NDArray[np.integer[Any]],
        identities: Callable[[], Iterable[bytes]],
    ) -> tuple[Positions, Positions]:
        """Choose the records held out of the training data, the same for every run.

        Args:
            sizes: Number of examples of each record.
            identities: Content of each record.

        Returns:
            Positions of the records that are held out, and of those that train.

        Raises:
            ConfigurationError: One of the two parts has no example.
        """
        option = f"data.{self._val_option}={self._val_count}"
        held_out, train = parted(self._split, identities, len(sizes), self._val_count)
        if self._val_count >= len(sizes) or not len(train):
            raise ConfigurationError(
                f"{option} leaves none of {len(sizes)} {self._records} for the training: lower it."
            )
        if not sizes[held_out].sum():
            raise ConfigurationError(
                f"{option} holds out no example of {len(sizes)} {self._records}: raise this expected number."
            )
        rank_zero_info(f"{self.name}: {len(held_out)} {self._records} are held out, {len(train)} train.")
        return held_out, train

    def _choose_members(self, identities: Callable[[], Iterable[bytes]]) -> NDArray[np.bool_] | None:
        """Choose the members among the training records; None: all are.

        Args:
            identities: Content of each training record.

        Raises:
            ConfigurationError: See `check_membership`.
        """
        if self._membership is None:
            return None
        self.check_membership()
        assert self._seed is not None
        # Hashes are kept, which take a fiftieth of the memory of small images.
        self._identities = [blake2b(identity, digest_size=16).digest() for identity in identities()]
        members = self.members_of_seed(self._seed)
        rank_zero_info(
            f"{self.name}: {members.sum()} of {len(members)} {self._records} train, by the coins of seed {self._seed}."
        )
        return members

    def check_membership(self) -> None:
        """Refuse a membership experiment that is not possible, before anything is loaded.

        Raises:
            ConfigurationError: There is no seed that determines the members, or batches keep their number of records.
        """
        if self._membership is None:
            return
        if self._seed is None:
            raise ConfigurationError(
                f"data.membership={self._membership} chooses members by the seed, and strategy.secure=true has "
                "none: remove strategy.secure=true."
            )
        check_scheme_of_members(find_scheme(self._sampling_kind))

    def members_of_seed(self, seed: int) -> NDArray[np.bool_]:
        """A boolean for each training record: whether the run with a seed is trained on it; with `membership` only.

        Args:
            seed: Seed of the run; all else of the data is the same.
        """
        return membership_coins(self._identities, seed)

    def setup(self, stage: str | None = None) -> None:
        """Load everything once.

        Raises:
            DataError: The data set is absent and cannot be downloaded, or damaged.
            ConfigurationError: The validation split leaves no training data, there are fewer records than asked for, or
                a subclass takes `membership` and chooses no members.
        """
        if self._splits is not None:
            return
        splits = self._load()
        if self._membership is not None and splits.members is None:
            # All records would be trained on, and an attack would take half of them for strangers.
            raise ConfigurationError(
                f"{type(self).__name__}._load returns no members, which data.membership={self._membership} requires: "
                "set Splits.members to the result of self._choose_members(...)."
            )
        self._splits = splits

    def with_batches_of(self, other: PrivateDataModule[ExamplesT]) -> PrivateDataModule[ExamplesT]:
        """A copy that shares the data sets, with the batches of another module.

        Args:
            other: A module of the same class, whose options differ in those of batches alone.
        """
        module = copy.copy(self)
        module.trainer = None
        module._expected_batch_size = other._expected_batch_size
        module._sampling_kind = other._sampling_kind
        module._size_schedule = other._size_schedule
        return module

    def _loaded(self) -> Splits[ExamplesT]:
        self.setup()
        assert self._splits is not None
        return self._splits

    @property
    def train_set(self) -> ExamplesT:
        """Data from which batches are drawn: the population of the ledger."""
        return self._loaded().train

    @property
    def val_set(self) -> ExamplesT | None:
        """Data held out of the training data, else the source's validation data, if any."""
        return self._loaded().val

    @property
    def test_set(self) -> ExamplesT:
        """The test examples."""
        return self._loaded().test

    @property
    def monitored(self) -> str:
        """Name of the data that `val_dataloader` gives: "val" or "test"."""
        return "test" if self.val_set is None else "val"

    @property
    def sampling(self) -> Sampling:
        """Sampling of the training batches."""
        return make_sampling(self._sampling_kind, count_of(self.train_set), self._expected_batch_size, self.unit)

    def train_dataloader(self) -> PrivateDataLoader:
        """Private batches, epoch after epoch."""
        lots = PrivateBatchSampler(self.sampling, self._seed, self._size_schedule, self.members)
        # A lot of users holds their positions: examples are collated by the data set, user by user.
        collate_fn = self._collate_fn if self.unit == "example" else None
        return PrivateDataLoader(self._lot_set, lots, collate_fn, self._record_of_lot_row)

    @property
    def _lot_set(self) -> Dataset[Any]:
        """Data set of the lots: the training set, or augmented views of it."""
        return self.train_set

    @property
    def _record_of_lot_row(self) -> RecordOfRow | None:
        """The `record_of_row` of batches; None: each row is a record."""
        return None

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation split, or without one the test set, for learning curves on which nothing is chosen."""
        return self._eval_loader(self.test_set if self.val_set is None else self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """The test set."""
        return self._eval_loader(self.test_set)

    def seen_dataloader(self, most: int) -> DataLoader[Any]:
        """The first training examples, at most so many, not augmented: measurements on them are private."""
        rows = np.arange(len(self.record_of_row))
        if self.members is not None:
            rows = rows[self.members[self.record_of_row]]
        return self._eval_loader(Subset(self._plain_examples(), rows[:most].tolist()))

    def candidate_dataloader(self) -> DataLoader[Any]:
        """All training examples in their order, members or not, not augmented; `record_of_row` has their records."""
        return self._eval_loader(self._plain_examples())

    @property
    def members(self) -> NDArray[np.bool_] | None:
        """A boolean for each training record: whether it is trained on; None: all are."""
        return self._loaded().members

    @property
    def record_of_row(self) -> Positions:
        """The training record to which each row of `candidate_dataloader` belongs."""
        return np.arange(count_of(self._plain_examples()))

    def held_out_batches(self) -> Iterator[Callable[[], Any]]:
        """Yield a function for each held-out record, which makes a batch of its examples alone."""
        assert self.val_set is not None
        record_of_row = self._held_out_record_of_row()
        order = np.argsort(record_of_row, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(record_of_row[order])) + 1):
            yield partial(self._batch_of, self.val_set, rows.tolist())

    def _batch_of(self, examples: Dataset[Any], rows: list[int]) -> Any:
        collation = Collation(examples, self._collate_fn)
        return next(iter(DataLoader(Subset(examples, rows), batch_size=len(rows), collate_fn=collation)))

    def _held_out_record_of_row(self) -> Positions:
        """The held-out record to which each row of `val_set` belongs."""
        assert self.val_set is not None
        return np.arange(count_of(self.val_set))

    def _plain_examples(self) -> Dataset[Any]:
        """The training examples as they are for an evaluation."""
        return self.train_set

    def _eval_loader(self, examples: Dataset[Any]) -> DataLoader[Any]:
        collation = Collation(examples, self._collate_fn)
        return DataLoader(examples, batch_size=self._eval_batch_size, collate_fn=collation)
