"""The data module of users: lots of users or of their examples, validation by users, and options of a source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpbench.capabilities.users.sources import USER_SOURCES, UserData, by_users
from dpbench.data import UserDataModule, UserDataset
from dpbench.data.records import Rows
from dpbench.errors import ConfigurationError
from tests.support.loaders import reserved


@pytest.fixture(autouse=True)
def _tiny() -> Iterator[None]:
    """A data set of 6 users with 3 examples each that says something of its license."""

    @by_users("tiny")
    def load(root: Path, download: bool, rows: int = 3) -> UserData:
        users = UserDataset(Rows(torch.arange(18.0), torch.arange(18) % 2), np.repeat(np.arange(6), 3))
        return UserData(users, Rows(torch.zeros(4), torch.zeros(4)), {"num_tags": 2}, attribution="by Ann")

    yield
    del USER_SOURCES["tiny"]


def test_lots_are_users() -> None:
    data = UserDataModule("digits_users", expected_batch_size=20, options={"image_size": 8})
    assert (data.sampling.kind, data.sampling.unit, data.sampling.population) == ("poisson", "user", 100)
    assert data.model_options() == {"input_shape": (1, 8, 8), "num_classes": 10}
    assert data.users.batch(0, [0])[0].shape == (1, 1, 8, 8)
    assert sum(len(y) for _, y in data.test_dataloader()) == 360
    assert data.monitored == "test" and data.val_set is None and data.test_users is None


def test_validation_holds_users_out() -> None:
    def module(**options: Any) -> UserDataModule:
        return UserDataModule("digits_users", expected_batch_size=5, options={"users": 30, "image_size": 8}, **options)

    whole, data, other = module(), module(val_users=7, seed=5), module(val_users=7, seed=6)
    held = sorted(set(whole.users.names) - set(data.users.names))
    assert len(held) == 30 - data.sampling.population and data.users.names == other.users.names
    assert data.monitored == "val"
    rows = whole.users.rows_of(np.array(held))  # names are positions here
    assert sum(len(labels) for _, labels in data.val_dataloader()) == len(rows)
    with pytest.raises(ConfigurationError, match="data.val_users=30 leaves none of 30 users"):
        module(val_users=30).setup()


def test_examples_of_the_same_users() -> None:
    options: dict[str, Any] = {"val_users": 2, "split": "permutation"}
    data = UserDataModule("tiny", expected_batch_size=6, sampling="fixed_size", unit="example", **options)
    assert (data.sampling.unit, data.sampling.population) == ("example", 12)
    users = UserDataModule("tiny", expected_batch_size=2, **options).users
    loaders = (reserved(data.train_dataloader()) for _ in range(20))
    seen = {value for loader in loaders for values, _ in loader for value in values.tolist()}
    assert seen <= set(users.rows_of(np.arange(4)).tolist()) and len(seen) > 5
    assert len(data.val_set or []) == 6


def test_attribution_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dpbench.capabilities.users.module.rank_zero_info", said.append)
    data = UserDataModule("tiny", expected_batch_size=2, options={"rows": None})
    data.setup()
    data.setup()
    assert said == ["tiny: by Ann"] and not hasattr(data, "noise_batch")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "digit_users"}, "unknown data set by users 'digit_users'; known are .*digits_users"),
        ({"expected_batch_size": 101}, "must lie between 1 and the 100 training users, not 101"),
        ({"options": {"user": 3}}, "there is no key data.options.user. Did you mean data.options.users"),
        ({"options": {"users": 0}}, "data.options.users must be a whole number of users of at least 1, not 0"),
        ({"options": {"alpha": 0}}, "data.options.alpha must be a number above 0, at most 1e6, not 0"),
        ({"unit": "person"}, "data.unit must be user or example, not 'person'"),
        ({"val_users": -1}, "data.val_users=-1 holds out no example"),
    ],
)
def test_bad_input_is_one_clear_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        UserDataModule(**{"name": "digits_users", "expected_batch_size": 20, **given}).train_dataloader()
    assert "\n" not in str(caught.value)
