"""The LightningDataModule of data sets by users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.sources import UserData, user_source
from dpbench.data.held_out import Split, name_bytes
from dpbench.data.inserted import InsertedTexts, Secret, inserted_of, refuse_membership_of_inserted, secret_of
from dpbench.data.module import Folder, Membership, PrivateDataModule, Splits
from dpbench.data.sources import data_root
from dpbench.data.texts import Sequences
from dpbench.errors import ConfigurationError
from dpbench.options import Count, PositiveInt
from dpbench.privacy.sampling import Positions

_NOTHING = InsertedTexts()


class UserDataModule(PrivateDataModule[Dataset[Any]]):
    """Training batches of users, an optional validation split by users, and the test examples of a data set by users.

    Args:
        name: See `dpbench.capabilities.users.sources.user_source`.
        root: Folder of the data sets; None takes $DPBENCH_DATA, else a per-user cache folder.
        expected_batch_size: Mean number of users in a training batch (a cohort).
        sampling: "poisson" (also None), "fixed_size", or another scheme's word; of non-private runs, too.
        val_users: Users taken from the training data for validation, with all their examples; their expected number
            with split="hash". The remaining users are the population of the ledger.
        eval_batch_size: Examples in a validation or test batch.
        download: True to download an absent data set.
        seed: Key of the batches; None takes the operating system's entropy.
        options: Options of the data set, see its page.
        unit: Unit of the records, "user" or "example" (one by one, of the same training users, so that the cost of both
            units can be compared on the same data; `expected_batch_size` then counts examples).
        split: Choice of the users of `val_users`, and of those that a file's option `held_out` takes for the test.
            "hash": each by a hash of the name, so that an additional user does not affect others. "permutation": the
            exact number, by a permutation, as in older runs; an additional user then changes most of them, and epsilon
            holds only for a user of the training set.
        expected_batch_size_schedule: Schedule of it over the rounds, as for `ImageDataModule`; None: constant.
        membership: "half": each training user is trained on by a fair coin, as for `ImageDataModule`. With
            unit="example" only for data sets without users of rows.
        inserted: Texts with secrets that join the training data, see `data.inserted`; each copy is the only example of
            a further user.

    Attributes:
        noise_batch: (size, generator) → batch that no private data went into; there only once the data are loaded, and
            of data sets that have such a thing.

    Raises:
        ConfigurationError: An option is unknown, out of range, or not for this data set.
    """

    _val_option = "val_users"
    _records = "users"

    def __init__(
        self,
        name: str,
        root: Folder | None = None,
        expected_batch_size: float = 50,
        sampling: str | None = None,
        val_users: Count = 0,
        eval_batch_size: PositiveInt = 1000,
        download: bool = True,
        seed: int | None = 0,
        options: dict[str, Any] | None = None,
        unit: Literal["user", "example"] = "user",
        split: Split = "hash",
        expected_batch_size_schedule: str | list[float] | None = None,
        membership: Membership | None = None,
        inserted: InsertedTexts = _NOTHING,
    ) -> None:
        super().__init__(
            root=root,
            expected_batch_size=expected_batch_size,
            sampling=sampling,
            val_count=val_users,
            eval_batch_size=eval_batch_size,
            download=download,
            seed=seed,
            split=split,
            expected_batch_size_schedule=expected_batch_size_schedule,
            membership=membership,
        )
        if unit not in ("user", "example"):
            raise ConfigurationError(f"data.unit must be user or example, not {unit!r}.")
        self._source = source = user_source(name)
        if unit == "user" and not source.has_users:
            raise ConfigurationError(
                f"data={name} has no users: set data.unit=example, or use a data set by users, such as a table with a "
                "column of users (docs/data_by_users.md)."
            )
        if unit == "example" and membership is not None and source.has_users:
            raise ConfigurationError("data.membership applies to whole users: set data.unit=user.")
        self.inserted = inserted_of(inserted, InsertedTexts)
        refuse_membership_of_inserted(membership, self.inserted)
        self.name = name
        self.unit = unit
        self.options: Mapping[str, Any] = source.check(options or {})
        self._data: UserData | None = None
        self._users: UserDataset | None = None
        self._held_out_users: UserDataset | None = None
        self.secrets: list[Secret] = []

    def _load(self) -> Splits[Dataset[Any]]:
        data = self._source.read(self.root, self._download, self.options, self._split)
        users = data.train
        val = data.val
        if self._val_count:
            held_out, train = self._hold_out(users.sizes, lambda: map(name_bytes, data.train.names))
            self._held_out_users = users.subset(held_out)
            val = _examples(self._held_out_users)
            users = users.subset(train)
        if self.inserted.records:
            if data.encode is None:
                raise ConfigurationError(
                    f"data.inserted requires sequences of characters, words or tokens, which data={self.name} does not "
                    "give: set data.options.text=characters, words or tokens, or remove the data.inserted overrides."
                )
            self.secrets = [secret_of(self.inserted, i, data.encode) for i in range(self.inserted.records)]
            users = _with_texts(users, torch.cat([secret.text for secret in self.secrets] * self.inserted.copies))
        if data.attribution:
            rank_zero_info(f"{self.name}: {data.attribution}")
        if data.noise_batch is not None:
            self.noise_batch = data.noise_batch
        self._data = data
        self._users = users
        by_user = self.unit == "user"
        user_of_record = range(len(users)) if by_user else _user_of_row(users)
        members = self._choose_members(lambda: (name_bytes(users.names[user]) for user in user_of_record))
        return Splits(users if by_user else _examples(users), val, data.test, members)

    @staticmethod
    def folder_of_own_files(options: Mapping[str, Any]) -> Path | None:
        """Find the folder that decides which records the options mean; None: the name of the data set alone does.

        Args:
            options: Options of a data module, as configured.
        """
        with suppress(ConfigurationError):  # of a name that is registered later
            if user_source(str(options.get("name"))).lies_anywhere:
                return None
        return data_root(options.get("root")).resolve()

    @property
    def data(self) -> UserData:
        """Data of the source: all training users, those held out for validation among them, and the test data."""
        self.setup()
        assert self._data is not None
        return self._data

    @property
    def users(self) -> UserDataset:
        """The training users, without those held out for validation."""
        self.setup()
        assert self._users is not None
        return self._users

    @property
    def test_users(self) -> UserDataset | None:
        """The test examples by user, where they have one."""
        return self.data.test_users

    def inserted_and_references(self) -> Iterator[tuple[DataLoader[Any], DataLoader[Any]]]:
        """Each inserted text, and its references."""
        self.setup()
        for secret in self.secrets:
            yield self._eval_loader(Sequences(secret.text)), self._eval_loader(Sequences(secret.references))

    def model_options(self) -> dict[str, Any]:
        """Options of a model or module that the data determine."""
        return dict(self.data.model_options)

    def describe_inputs(self) -> dict[str, Any]:
        """How an input is prepared, and names of the classes, for users of an exported model."""
        return dict(self.data.inputs)

    @property
    def _collate_fn(self) -> Callable[[Any], Any] | None:
        return self.users.collate_fn

    def _plain_examples(self) -> Dataset[Any]:
        return _examples(self.users)

    def _held_out_record_of_row(self) -> Positions:
        if self.unit == "user" and self._held_out_users is not None:
            return _user_of_row(self._held_out_users)
        return super()._held_out_record_of_row()

    @property
    def record_of_row(self) -> Positions:
        """The training record to which each row of `candidate_dataloader` belongs: a user, or the example itself."""
        return _user_of_row(self.users) if self.unit == "user" else super().record_of_row


def _with_texts(users: UserDataset, texts: Tensor) -> UserDataset:
    """Users of `Sequences`, and a further one for each of some texts."""
    examples: Any = users.examples
    own = examples.tokens[users.rows_of(np.arange(len(users)))]
    sizes = [*users.sizes, *[1] * len(texts)]
    joined = UserDataset(Sequences(torch.cat([own, texts])), np.repeat(range(len(sizes)), sizes), range(len(sizes)))
    joined.names = [*users.names, *(f"inserted {number}" for number in range(len(texts)))]
    return joined


def _user_of_row(users: UserDataset) -> Positions:
    """Position of the user of each of `_examples`."""
    positions = np.arange(len(users))
    order = np.argsort(users.rows_of(positions))
    return np.repeat(positions, users.sizes)[order]


def _examples(users: UserDataset) -> Dataset[Any]:
    """The examples of some users, without the users."""
    rows = np.sort(users.rows_of(np.arange(len(users))))
    return Subset(users.examples, rows.tolist())
