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


def module(folder: Path, users: list[str] = USERS, name: str = "user_table", **options: Any) -> UserDataModule:
    """Of a table with three rows of each user, of the same content."""
    path = folder / "t.csv"
    pd.DataFrame({"user": np.repeat(users, 3), "a": 0.0, "label": 1}).to_csv(path, index=False)
    own = {"path": str(path), "features": [["a"], "label"], "num_classes": 2, "held_out": 0.1}
    data = UserDataModule(name, expected_batch_size=10, options=own, **options)
    data.setup()
    return data


@pytest.mark.parametrize("unit", ["user", "example"])
def test_a_user_more_moves_no_other(unit: str, tmp_path: Path) -> None:
    before = module(tmp_path, val_users=50, unit=unit)
    for new in NEWCOMERS:
        after = module(tmp_path, [*USERS, new], val_users=50, unit=unit)
        assert set(after.users.names) - {new} == set(before.users.names)
        assert set(after.test_users.names) - {new} == set(before.test_users.names)  # type: ignore[union-attr]
        expected = len(before.users) + (new in after.users.names)
        assert after.sampling.population == (expected if unit == "user" else 3 * expected)


def test_users_for_choices_are_not_those_for_the_test_again(tmp_path: Path) -> None:
    """With one hash for both parts hardly any user would be left for the smaller one."""
    many = [f"user {number}" for number in range(2000)]
    data = module(tmp_path, many, val_users=200)
    held_out = len(many) - len(data.users) - len(data.test_users)  # type: ignore[arg-type]
    assert 150 < held_out < 250


def test_a_share_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="held_out=0.1 holds none of the 2 users .* another share"):
        module(tmp_path, USERS[2:4])


def test_users_are_members_with_all_their_rows(tmp_path: Path) -> None:
    data = module(tmp_path, membership="half", seed=1)
    members = data.members
    assert members is not None and members.shape == (len(data.users),) and 0 < members.sum() < len(members)
    rows = sum(len(labels) for _, labels in data.candidate_dataloader())
    assert rows == len(data.record_of_row) == data.users.sizes.sum()
    assert torch.bincount(torch.as_tensor(data.record_of_row)).tolist() == data.users.sizes.tolist()
    with pytest.raises(ConfigurationError, match="data.unit=user"):
        module(tmp_path, membership="half", unit="example")


def test_rows_without_users_are_members_one_by_one(tmp_path: Path) -> None:
    """Copies of a record have coins of their own."""
    one, two = (module(tmp_path, name="table", membership="half", seed=seed, unit="example") for seed in (1, 2))
    assert one.members is not None and one.members.shape == (len(one.train_set),)
    assert 0.4 < one.members.mean() < 0.6 and (one.members != two.members).any()
