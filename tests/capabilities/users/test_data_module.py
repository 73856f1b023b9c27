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


@pytest.fixture
def tiny() -> Iterator[str]:
    """A data set of 6 users with 3 examples each that says something of its license."""

    @by_users("tiny")
    def load(root: Path, download: bool, rows: int = 3) -> UserData:
        examples = Rows(torch.arange(6.0 * rows), torch.arange(6 * rows) % 2)
        users = UserDataset(examples, np.repeat(np.arange(6), rows))
        return UserData(users, Rows(torch.zeros(4), torch.zeros(4)), {"num_tags": 2}, attribution="by Ann")

    yield "tiny"
    del USER_SOURCES["tiny"]


def test_lots_are_users() -> None:
    data = UserDataModule("digits_users", expected_batch_size=20, options={"image_size": 8})
    assert data.sampling.kind == "poisson" and data.sampling.unit == "user" and data.sampling.population == 100
    assert isinstance(data.train_set, UserDataset)
    assert data.model_options() == {"input_shape": (1, 8, 8), "num_classes": 10}
    images, labels = data.users.batch(0, [0])
    assert images.shape == (1, 1, 8, 8) and labels.dtype == torch.int64
    assert sum(len(y) for _, y in data.test_dataloader()) == 360
    assert data.monitored == "test" and data.val_set is None and data.test_users is None
    noise, _ = data.noise_batch(5, torch.Generator().manual_seed(0))
    assert noise.shape == (5, 1, 8, 8)
    assert float(noise.min()) == pytest.approx(-0.3053 / 0.3760, abs=0.1)


def test_validation_holds_users_out() -> None:
    options = {"users": 30, "image_size": 8}
    whole = UserDataModule("digits_users", options=options, expected_batch_size=5)
    data = UserDataModule("digits_users", options=options, expected_batch_size=5, val_users=7, seed=5)
    other = UserDataModule("digits_users", options=options, expected_batch_size=5, val_users=7, seed=6)
    assert 0 < len(data.users) < 30 and len(data.users) == data.sampling.population
    assert data.users.names == other.users.names
    held = sorted(set(whole.users.names) - set(data.users.names))
    assert len(held) == 30 - len(data.users) and data.monitored == "val"
    rows = np.concatenate([whole.users.rows(int(name)) for name in held])  # names are positions here
    labels = torch.cat([y for _, y in data.val_dataloader()])
    assert torch.equal(labels, whole.users.examples.labels[np.sort(rows)])  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="data.val_users=30 leaves nothing of 30 training users"):
        UserDataModule("digits_users", options=options, val_users=30).setup()


def test_examples_of_the_same_users(tiny: str) -> None:
    options: dict[str, Any] = {"val_users": 2, "split": "permutation"}
    data = UserDataModule(tiny, expected_batch_size=6, sampling="fixed_size", unit="example", **options)
    assert data.sampling.unit == "example" and data.sampling.population == 12
    users = UserDataModule(tiny, expected_batch_size=2, **options).users
    theirs = np.concatenate([users.rows(user) for user in range(4)])
    seen: set[float] = set()
    for _ in range(20):
        for values, _ in data.train_dataloader():
            assert values.shape == (6,)
            seen |= set(values.tolist())
    assert seen <= set(theirs.tolist()) and len(seen) > 5
    assert len(data.val_set or []) == 6


def test_attribution_is_said(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dpbench.capabilities.users.module.rank_zero_info", said.append)
    data = UserDataModule(tiny, expected_batch_size=2)
    data.setup()
    data.setup()
    assert said == ["tiny: by Ann"]
    assert not hasattr(data, "noise_batch")
    assert data.model_options() == {"num_tags": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "digit_users"}, "unknown data set by users 'digit_users'; known are .*digits_users"),
        ({"expected_batch_size": 101}, "must lie between 1 and the 100 training users, not 101"),
        ({"expected_batch_size": 0}, "must lie between 1 and the 100 training users, not 0"),
        ({"expected_batch_size": -5}, "between 1 and the 100 training users, not -5"),
        ({"expected_batch_size": float("nan")}, "between 1 and the 100 training users, not nan"),
        ({"expected_batch_size": 0.1}, "Is it a rate\\? That is expected_batch_size=10"),
        ({"expected_batch_size": 2.5, "sampling": "fixed_size"}, "need a whole expected_batch_size"),
        ({"options": {"user": 3}}, "there is no key data.options.user. Did you mean data.options.users"),
        ({"options": {"users": 0}}, "data.options.users must be a whole number of users from 1 on, not 0"),
        ({"options": {"users": 2.5}}, "data.options.users must be a whole number of users from 1 on, not 2.5"),
        ({"options": {"users": "many"}}, "data.options.users must be a whole number .*, not 'many'"),
        ({"options": {"users": 2000}}, "data.options.users must be at most the number of examples, 1437, not 2000"),
        ({"options": {"alpha": float("nan")}}, "data.options.alpha must be a number above 0, at most 1e6, not nan"),
        ({"options": {"alpha": 0}}, "data.options.alpha must be a number above 0"),
        ({"unit": "person"}, "data.unit must be user or example, not 'person'"),
        ({"val_users": -1}, "data.val_users=-1 holds out no example"),
    ],
)
def test_bad_input_is_one_clear_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        UserDataModule(**{"name": "digits_users", "expected_batch_size": 20, **given}).train_dataloader()
    assert "\n" not in str(caught.value)


def test_none_is_the_default_of_an_option() -> None:
    assert len(UserDataModule("digits_users", options={"users": None}).users) == 100
