"""Users with examples of their own: whose they are, how they become batches, and what cannot be users."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Rows, shared_records
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError, DataError
from tests.capabilities.users.worlds import make_users


def numbered(size: int) -> Rows:
    """Examples that are their own position."""
    return Rows(torch.arange(size), torch.arange(size) * 10)


@pytest.fixture
def users() -> UserDataset:
    return UserDataset(numbered(6), [5, 3, 5, 9, 3, 5])


def padded(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-1)


def test_rows_are_those_of_the_user(users: UserDataset) -> None:
    assert users.names == [3, 5, 9] and users.sizes.tolist() == [2, 3, 1]
    assert [users.rows(user).tolist() for user in range(3)] == [[1, 4], [0, 2, 5], [3]]
    assert [part.tolist() for part in users.batch(1, [2, 0])] == [[5, 0], [50, 0]]


def test_names_fix_the_order_and_keep_users_without_examples() -> None:
    users = UserDataset(numbered(3), torch.tensor([7, 2, 7]), names=[7, 1, 2, 4])
    assert users.sizes.tolist() == [2, 0, 1, 0] and users.batch(1, [])[0].shape == (0,)
    assert UserDataset(numbered(3), np.array(["b", "a", "b"], dtype=object)).names == ["a", "b"]


@pytest.mark.parametrize(
    ("users", "names", "message"),
    [
        ([[0], [1], [2]], None, r"there are 3 examples and \(3, 1\) users"),
        (["a", None, "b"], None, r"some examples have no user \(None, NaN\)"),
        ([1, "1", 1.0], None, r"named in several ways \(float, int, str\)"),
        (["a", "b", "c"], ["a", "b"], "'c' has examples, but is not in names"),
        ([0, 1, 1], [0, 1, 0], "names contains a user twice"),
    ],
)
def test_columns_that_are_no_users(users: Any, names: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        UserDataset(numbered(3), users, names)


def test_datasets_of_users() -> None:
    users = UserDataset.from_datasets({"ann": numbered(2), "bob": numbered(0), "cid": numbered(3)})
    assert users.names == ["ann", "bob", "cid"] and users.sizes.tolist() == [2, 0, 3]
    assert users.batch(2, [0, 2])[1].tolist() == [0, 20]
    with pytest.raises(ConfigurationError, match="no user has an example"):
        UserDataset.from_datasets({"bob": numbered(0)})


def test_subset_keeps_whole_users(users: UserDataset) -> None:
    some = users.subset([2, 0])
    assert some.names == [9, 3] and [some.rows(user).tolist() for user in range(2)] == [[3], [1, 4]]
    assert len(users) == 3
    with pytest.raises(ConfigurationError, match="positions of users, not names: 'ann'"):
        users.subset(["ann"])  # type: ignore[list-item]


def test_items_are_users_and_lots_are_cohorts(users: UserDataset) -> None:
    with pytest.raises(IndexError):
        users[3]
    loader = PrivateDataLoader.poisson(users, 2)
    assert loader.lots.sampling.unit == "user"
    assert loader.collate_fn([]).positions.shape == (0,)
    with pytest.raises(ConfigurationError, match="is a user, but the loader's unit is example"):
        PrivateDataLoader(users, PrivateBatchSampler(make_sampling("poisson", 3, 2), seed=0))
    with pytest.raises(ConfigurationError, match="must lie between 1 and the 3 training users, not 4"):
        PrivateDataLoader.poisson(users, 4)


def test_examples_of_an_own_data_set() -> None:
    sequences: Any = [torch.full((length,), length) for length in (3, 1, 2, 2)]
    names = ["ann", "ann", "bob", "bob"]
    users = UserDataset(sequences, names)
    assert users.batch(1, [1, 0]).tolist() == [[2, 2], [2, 2]]
    with pytest.raises(DataError, match="examples of user 'ann' cannot be batched.*the same shape.*collate_fn"):
        users.batch(0, [0, 1])
    users = UserDataset(sequences, names, collate_fn=padded)
    assert users.batch(0, [0, 1]).tolist() == [[3, 3, 3], [1, -1, -1]]
    with pytest.raises(ConfigurationError, match=r"differ in length: \[2, 3\]"):
        Rows(torch.zeros(2), torch.zeros(3))


def test_examples_of_training_users_are_training_records() -> None:
    users = make_users()
    held, rest = users.subset([0, 3]), users.subset([1, 2, *range(4, len(users))])
    assert shared_records(users.examples, users) == len(users.examples)  # type: ignore[arg-type]
    assert shared_records(held.examples, rest) == int(rest.sizes.sum())  # `examples` are everybody's
    assert shared_records(Subset(users.examples, held.rows(0).tolist()), rest) == shared_records(held, rest) == 0
