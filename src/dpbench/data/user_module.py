"""The LightningDataModule of data sets by users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset, Subset

import dpbench.data.user_sources  # noqa: F401  they register themselves
from dpbench.data.held_out import Split, check_split, name_bytes, parted
from dpbench.data.images import Count, Folder, Positive
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.records import Collation, count_of
from dpbench.data.sources import data_root
from dpbench.data.user_data import UserData, checked_options, load_user_data
from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling import Sampling


class UserDataModule(pl.LightningDataModule):
    """Training lots of users, an optional validation split by users, and the test examples of a data set by users.

    Args:
        name: A name in `dpbench.data.user_data.USER_SOURCES`.
        root: Folder of the data sets; None takes $DPBENCH_DATA, else a per-user cache folder.
        expected_batch_size: Mean number of users in a training lot (a cohort).
        sampling: "poisson" (also None), "fixed_size", or another scheme's word; of non-private runs, too.
        val_users: Users taken from the training data for validation, with all their examples; their expected number
            with split="hash". The population that the ledger states is what remains.
        eval_batch_size: Examples in a validation or test batch.
        download: Whether what is absent may be downloaded.
        seed: Key of the lots; None takes the operating system's entropy.
        options: Of the data set; what it has, its page says.
        unit: What a lot is drawn of. "example": the examples of the same training users, one by one, so that what both
            units cost can be compared on the same data; `expected_batch_size` then counts examples.
        split: How the users of `val_users`, and those that a file's option `held_out` takes for the test, are chosen.
            "hash": each by a hash of the name, so that one user more moves no other one. "permutation": exactly as many
            as asked for, by their number, as in runs of before; one user more then exchanges most of them, and epsilon
            holds for a user of the training set alone.
        expected_batch_size_schedule: How it moves over the rounds, as for `ImageDataModule`; None: not.

    Attributes:
        noise_batch: (size, generator) → batch that no private data went into; there only once the data are loaded, and
            of data sets that have such a thing.
    """

    name: str

    def __init__(
        self,
        name: str,
        root: Folder | None = None,
        expected_batch_size: float = 50,
        sampling: str | None = None,
        val_users: Count = 0,
        eval_batch_size: Positive = 1000,
        download: bool = True,
        seed: int | None = 0,
        options: dict[str, Any] | None = None,
        unit: Literal["user", "example"] = "user",
        split: Split = "hash",
        expected_batch_size_schedule: str | list[float] | None = None,
    ) -> None:
        super().__init__()
        check_split(split)
        self._split = split
        self.name = name
        self.root = data_root(root)
        self.unit = unit
        self.options: Mapping[str, Any] = checked_options(name, options or {})
        self._expected_batch_size = expected_batch_size
        self._kind = sampling or "poisson"
        self._size_schedule = expected_batch_size_schedule
        self._val_users = val_users
        self._eval_batch_size = eval_batch_size
        self._download = download
        self._seed = seed
        self._data: UserData | None = None
        self._users: UserDataset | None = None
        self._val: Dataset[Any] | None = None
        if unit not in ("user", "example"):
            raise ConfigurationError(f"data.unit must be user or example, not {unit!r}.")
        if eval_batch_size < 1 or val_users < 0:
            raise ConfigurationError("data.eval_batch_size must be positive and data.val_users at least 0.")

    def setup(self, stage: str | None = None) -> None:
        """Load everything once.

        Raises:
            DataError: The data set is absent and cannot be downloaded, or damaged.
            ConfigurationError: The validation split leaves no training users.
        """
        if self._data is not None:
            return
        data = load_user_data(self.name, self.root, self._download, self.options, self._split)
        users = data.train
        self._val = data.val
        if self._val_users:
            held_out, users = self._parted(users)
            self._val = _examples(held_out, plain=True)
            rank_zero_info(f"{self.name}: {len(held_out)} users are held out, {len(users)} train.")
        if data.attribution:
            rank_zero_info(f"{self.name}: {data.attribution}")
        if data.noise_batch is not None:
            self.noise_batch = data.noise_batch
        self._data = data
        self._users = users

    def _parted(self, users: UserDataset) -> tuple[UserDataset, UserDataset]:
        """Users for validation, and those that train."""
        first, rest = parted(
            self._split,
            lambda: map(name_bytes, users.names),
            len(users),
            self._val_users,
        )
        if self._val_users >= len(users) or not len(rest):
            raise ConfigurationError(
                f"data.val_users={self._val_users} leaves nothing of {len(users)} training users to train on."
            )
        if not users.subset(first).sizes.sum():
            raise ConfigurationError(
                f"data.val_users={self._val_users} holds out no example of {len(users)} training users: it is their "
                "expected number; raise it."
            )
        return users.subset(first), users.subset(rest)

    @property
    def data(self) -> UserData:
        """What the source gave: all training users, those held out for validation among them, and the test data."""
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
    def train_set(self) -> Dataset[Any]:
        """What lots are drawn from, the population of the ledger: users, or with unit="example" their examples."""
        return self.users if self.unit == "user" else _examples(self.users)

    @property
    def val_set(self) -> Dataset[Any] | None:
        """The examples of users held out of the training data; else what the source gives for validation, if any."""
        self.setup()
        return self._val

    @property
    def test_set(self) -> Dataset[Any]:
        """The test examples."""
        return self.data.test

    @property
    def test_users(self) -> UserDataset | None:
        """The test examples by user, where they have one."""
        return self.data.test_users

    def model_options(self) -> dict[str, Any]:
        """Options of a model or module that the data determine."""
        return dict(self.data.model_options)

    @property
    def monitored(self) -> str:
        """Which data `val_dataloader` gives: "val" or "test"."""
        return "test" if self.val_set is None else "val"

    @property
    def sampling(self) -> Sampling:
        """How training lots are drawn."""
        return make_sampling(
            self._kind,
            count_of(self.train_set),
            self._expected_batch_size,
            self.unit,
        )

    def train_dataloader(self) -> LotLoader:
        """Lots of one epoch after the other."""
        collate = None if self.unit == "user" else self.users.collate_fn
        return LotLoader(
            self.train_set,
            Lots(self.sampling, self._seed, self._size_schedule),
            collate,
        )

    def _eval_loader(self, examples: Dataset[Any]) -> DataLoader[Any]:
        collate = Collation(examples, self.users.collate_fn)
        return DataLoader(examples, batch_size=self._eval_batch_size, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation split, or without one the test set, for learning curves on which nothing is chosen."""
        return self._eval_loader(self.test_set if self.val_set is None else self.val_set)

    def seen_dataloader(self, most: int) -> DataLoader[Any]:
        """The first training examples, at most so many, not augmented: what is measured on them is private."""
        seen = _examples(self.users, plain=True)
        return self._eval_loader(Subset(seen, range(min(most, count_of(seen)))))

    def test_dataloader(self) -> DataLoader[Any]:
        """The test set."""
        return self._eval_loader(self.test_set)


def _examples(users: UserDataset, plain: bool = False) -> Dataset[Any]:
    """The examples of some users, without saying whose; `plain`: as they are for an evaluation."""
    rows = np.sort(np.concatenate([users.rows(user) for user in range(len(users))]))
    return Subset(getattr(users.examples, "plain", users.examples) if plain else users.examples, rows.tolist())
