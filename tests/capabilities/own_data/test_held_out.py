"""Who of a table is held out, and who is a member: each user and each row by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dpbench.capabilities.users.module import UserDataModule
from dpbench.errors import ConfigurationError, DataError

NEWCOMERS = ("aaa", "u0250x", "zzz", *(f"new{number}" for number in range(20)))
USERS = [f"u{number:04}" for number in range(500)]


def table(folder: Path, users: list[str]) -> str:
    path = folder / "t.csv"
    frame = pd.DataFrame({"user": np.repeat(users, 3), "a": 0.0, "b": 1.0, "label": 1})
    frame.to_csv(path, index=False)
    return str(path)


def module(path: str, **options: Any) -> UserDataModule:
    own = {"path": path, "features": [["a", "b"], "label"], "num_classes": 2, "held_out": 0.1}
    data = UserDataModule("user_table", expected_batch_size=10, options=own, **options)
    data.setup()
    return data


@pytest.mark.parametrize("unit", ["user", "example"])
def test_a_user_more_moves_no_other(unit: str, tmp_path: Path) -> None:
    before = module(table(tmp_path, USERS), val_users=50, unit=unit)
    assert before.test_users is not None
    for new in NEWCOMERS:
        after = module(table(tmp_path, [*USERS, new]), val_users=50, unit=unit)
        assert after.test_users is not None
        assert set(after.users.names) - {new} == set(before.users.names)
        assert set(after.test_users.names) - {new} == set(before.test_users.names)
        expected = len(before.users) + (new in after.users.names)
        assert after.sampling.population == (expected if unit == "user" else 3 * expected)


def test_the_split_of_before_is_an_option(tmp_path: Path) -> None:
    users = module(table(tmp_path, USERS), split="permutation", val_users=20)
    assert len(users.users) == 430 and users.test_users is not None and len(users.test_users) == 50


def test_a_share_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="held_out=0.1 holds none of the 2 users .* another share"):
        module(table(tmp_path, USERS[:2]))


def test_copies_of_a_record_have_coins_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    pd.DataFrame({"age": np.zeros(400), "label": np.ones(400, dtype=int)}).to_csv(path, index=False)
    options = {"path": str(path), "features": [["age"], "label"], "test_path": str(path)}
    data = UserDataModule("table", membership="half", seed=1, options=options, unit="example", expected_batch_size=5)
    members = data.members
    assert members is not None
    assert 100 < members.sum() < 300


def user_table(folder: Path) -> dict[str, Any]:
    users = np.repeat(np.arange(30), np.arange(30) % 4 + 1)
    table = pd.DataFrame({"who": users, "age": np.arange(len(users)) / 100, "label": users % 2})
    table = table.sample(frac=1, random_state=0)
    path = folder / "table.csv"
    table.to_csv(path, index=False)
    return {"path": str(path), "user": "who", "held_out": 0.2, "features": [["age"], "label"]}


def test_users_are_members_with_all_their_rows(tmp_path: Path) -> None:
    data = UserDataModule("user_table", membership="half", seed=1, options=user_table(tmp_path), expected_batch_size=5)
    members = data.members
    assert members is not None
    assert members.shape == (len(data.users),)
    assert 0 < members.sum() < len(members)
    ages = torch.cat([batch[0].flatten() for batch in data.candidate_dataloader()])
    assert len(ages) == len(data.record_of_row) == data.users.sizes.sum()
    for user in range(len(data.users)):
        own = data.users.batch(user, range(data.users.sizes[user]))
        assert sorted(ages[data.record_of_row == user].tolist()) == sorted(own[0].flatten().tolist())


def test_rows_without_users_are_members_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    pd.DataFrame({"age": np.arange(50) / 50, "label": np.arange(50) % 2}).to_csv(path, index=False)
    options = {"path": str(path), "features": [["age"], "label"]}
    data = UserDataModule("table", membership="half", seed=1, options=options, unit="example", expected_batch_size=5)
    members = data.members
    assert members is not None
    assert members.shape == (len(data.train_set),)
    again = UserDataModule("table", membership="half", seed=2, options=options, unit="example", expected_batch_size=5)
    assert (again.members != members).any()


def test_examples_of_users_are_no_members_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="data.unit=user"):
        UserDataModule("user_table", membership="half", unit="example", options=user_table(tmp_path))
