"""Users with examples of their own: whose they are, how they become batches, and what cannot be users."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.records import Rows, shared_records
from dpbench.errors import ConfigurationError, DataError
from tests.capabilities.users.worlds import make_users


def numbered(size: int) -> Rows:
    """Examples that are their own position."""
    return Rows(torch.arange(size), torch.arange(size) * 10)


class Lazy(Dataset[Any]):
    """Examples that are made when they are asked for, each a dictionary with a sequence of its own length."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position >= len(self):
            raise IndexError(position)
        return {"tokens": torch.full((self.lengths[position],), position), "label": position}


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([one["tokens"] for one in examples], batch_first=True, padding_value=-1)
    return {"tokens": tokens, "label": torch.tensor([one["label"] for one in examples])}


def test_rows_are_those_of_the_user() -> None:
    users = UserDataset(numbered(6), [5, 3, 5, 9, 3, 5])
    assert users.names == [3, 5, 9]
    assert users.sizes.tolist() == [2, 3, 1]
    assert [users.rows(user).tolist() for user in range(3)] == [[1, 4], [0, 2, 5], [3]]
    assert users.batch(1, [2, 0])[0].tolist() == [5, 0]
    assert users.batch(1, [2, 0])[1].tolist() == [50, 0]


@pytest.mark.parametrize(
    "column", [["b", "a", "b"], np.array(["b", "a", "b"]), np.array(["b", "a", "b"], dtype=object)]
)
def test_users_may_be_words(column: Any) -> None:
    users = UserDataset(numbered(3), column)
    assert users.names == ["a", "b"]
    assert users.rows(1).tolist() == [0, 2]


def test_names_fix_the_order_and_keep_users_without_examples() -> None:
    users = UserDataset(numbered(3), torch.tensor([7, 2, 7]), names=[7, 1, 2, 4])
    assert users.sizes.tolist() == [2, 0, 1, 0]
    assert users.rows(1).tolist() == []
    assert users.batch(1, [])[0].shape == (0,)
    assert len(users) == 4 and repr(users) == "UserDataset(4 users, 3 examples)"


@pytest.mark.parametrize(
    ("users", "names", "message"),
    [
        ([0, 1], None, "there are 3 examples and 2 users: give the user of each example, one by one"),
        ([[0], [1], [2]], None, r"there are 3 examples and \(3, 1\) users"),
        ([0.0, float("nan"), 1.0], None, r"some examples have no user \(None, NaN\)"),
        (["a", None, "b"], None, r"some examples have no user \(None, NaN\)"),
        (np.array(["a", 1, "b"], dtype=object), None, r"named in several ways \(int, str\)"),
        (["a", "b", "c"], ["a", "b"], "'c' has examples, but is not among the names"),
        ([0, 1, 1], [0, 1, 0], "a name stands twice"),
    ],
)
def test_columns_that_are_no_users(users: Any, names: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        UserDataset(numbered(3), users, names)


def test_datasets_of_users() -> None:
    users = UserDataset.from_datasets({"ann": numbered(2), "bob": numbered(0), "cid": numbered(3)})
    assert users.names == ["ann", "bob", "cid"]
    assert users.sizes.tolist() == [2, 0, 3]
    assert users.batch(2, [0, 2])[1].tolist() == [0, 20]
    assert users.batch(1, [])[0].shape == (0,)
    with pytest.raises(ConfigurationError, match="no user has an example"):
        UserDataset.from_datasets({"bob": numbered(0)})


def test_words_that_are_objects_are_names() -> None:
    assert UserDataset(numbered(3), np.array(["b", "a", "b"], dtype=object)).names == ["a", "b"]


def test_subset_takes_positions() -> None:
    with pytest.raises(ConfigurationError, match="positions of users, not names: 'ann'"):
        UserDataset(numbered(2), ["ann", "bob"]).subset(["ann"])  # type: ignore[list-item]


def test_subset_keeps_whole_users() -> None:
    users = UserDataset(numbered(6), [5, 3, 5, 9, 3, 5])
    some = users.subset([2, 0])
    assert some.names == [9, 3]
    assert [some.rows(user).tolist() for user in range(2)] == [[3], [1, 4]]
    assert some.batch(1, [1])[0].tolist() == [4]
    assert len(users) == 3 and users.sizes.tolist() == [2, 3, 1]
    assert len(users.subset([])) == 0


def test_items_are_users_and_lots_are_cohorts() -> None:
    users = UserDataset(numbered(6), [5, 3, 5, 9, 3, 5])
    assert int(users[1].positions) == 1 and int(users[-1].positions) == 2
    with pytest.raises(IndexError):
        users[3]
    loader = LotLoader(users, Lots(make_sampling("fixed_size", 3, 2, unit="user"), seed=0))
    cohort = next(iter(loader))
    assert cohort.positions.shape == (2,) and cohort.positions.dtype == torch.int64
    assert "of 3 users" in repr(loader)
    empty = LotLoader(users, Lots(make_sampling("poisson", 3, 1, unit="user"), seed=0)).collate_fn([])
    assert empty.positions.shape == (0,)


def test_lots_say_that_they_draw_users() -> None:
    users = UserDataset(numbered(6), [5, 3, 5, 9, 3, 5])
    assert LotLoader.poisson(users, 2).lots.sampling.unit == "user"
    with pytest.raises(
        ConfigurationError, match="an item of the UserDataset is a user, but the loader's unit is example"
    ):
        LotLoader(users, Lots(make_sampling("poisson", 3, 2), seed=0))
    with pytest.raises(ConfigurationError, match="must lie between 1 and the 3 training users, not 4"):
        LotLoader.poisson(users, 4)


def test_the_same_cohorts_with_a_worker() -> None:
    users = UserDataset(numbered(40), np.arange(40) % 20)
    plain = [lot.positions.tolist() for lot in LotLoader.poisson(users, 5, seed=3)]
    worker = [lot.positions.tolist() for lot in LotLoader.poisson(users, 5, seed=3, num_workers=1)]
    assert plain == worker and len(plain) == 4


def test_own_data_set_with_a_collate_fn() -> None:
    users = UserDataset(Lazy([3, 1, 2, 4]), ["x", "y", "x", "y"], collate_fn=padded)
    batch = users.batch(0, [0, 1])
    assert batch["tokens"].tolist() == [[0, 0, 0], [2, 2, -1]]
    assert batch["label"].tolist() == [0, 2]
    assert users.batch(1, [])["tokens"].shape[0] == 0


def test_own_data_set_of_dictionaries() -> None:
    users = UserDataset(Lazy([2, 2, 2]), [0, 0, 1])
    batch = users.batch(0, [1, 0])
    assert batch["tokens"].tolist() == [[1, 1], [0, 0]] and batch["label"].tolist() == [1, 0]


def test_other_shapes_are_named_with_the_user() -> None:
    users = UserDataset(Lazy([3, 1, 2, 2]), ["ann", "ann", "bob", "bob"])
    assert users.batch(1, [0, 1])["tokens"].shape == (2, 2)
    with pytest.raises(DataError, match="examples of user 'ann' make no batch.*the same shapes.*collate_fn"):
        users.batch(0, [0, 1])


def test_tensors_of_examples_have_one_length() -> None:
    with pytest.raises(ConfigurationError, match=r"differ in length: \[2, 3\]"):
        Rows(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("names", [[1, "1", 1.0], [b"a", "a", "b"], ["a", "b", 1]])
def test_users_are_named_in_one_way(names: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match="users are named in several ways"):
        UserDataset(Rows(torch.zeros(9, 2)), names * 3)


def test_examples_of_training_users_are_training_records() -> None:
    users = make_users()
    held = users.subset([0, 3])
    rest = users.subset([user for user in range(len(users)) if user not in (0, 3)])
    assert shared_records(users.examples, users) == len(users.examples)  # type: ignore[arg-type]
    assert shared_records(held.examples, rest) == int(rest.sizes.sum())  # `examples` are everybody's
    assert shared_records(Subset(users.examples, held.rows(0).tolist()), rest) == 0
    assert shared_records(held, rest) == 0
