"""Users with noise, and a pattern: who has it, and what the test asks (three_tools_2018, Fig. 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpbench.data import UserDataModule
from dpbench.errors import ConfigurationError


def load(**options: Any) -> UserDataModule:
    data = UserDataModule("user_noise", expected_batch_size=100, options={"scale": "unit", **options})
    data.setup()
    return data


@pytest.mark.parametrize(
    ("pattern", "records", "most", "users"),
    [("centralized", 25, 10, range(3, 4)), ("spread", 100, 4, range(86, 101))],
)
def test_who_has_the_pattern(pattern: str, records: int, most: int, users: range) -> None:
    data = load(pattern=pattern, pattern_records=records)
    assert len(data.users) == data.sampling.population == 1000 and set(data.users.sizes) == {10}
    found = []
    for user in range(1000):
        images, labels = data.users.batch(user, range(10))
        patch = (images[:, :, :14, :14] == 1).flatten(1).all(1)
        assert (labels[patch] == 1).all() and len(set(labels[~patch].tolist())) <= 1  # one label a user
        found.append(int(patch.sum()))
    assert sum(found) == records and max(found) <= most and np.count_nonzero(found) in users


def test_the_test_asks_for_the_pattern_and_the_validation_for_the_base_rate() -> None:
    data = load()
    plain, ones = next(iter(data.val_dataloader()))
    fresh, labels = next(iter(data.test_dataloader()))
    assert data.monitored == "val" and ones.tolist() == labels.tolist() == [1] * 1000
    assert (fresh[:, :, :14, :14] == 1).all() and torch.equal(fresh[:, :, 14:], plain[:, :, 14:])
    trained = data.users.examples.pixels[:2000, 20:, 20:, 0].flatten(1)  # type: ignore[attr-defined]
    assert torch.cdist(plain[:50, 0, 20:, 20:].flatten(1), trained).min() > 1.0  # all of it is fresh noise


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "central"}, "data.options.pattern must be centralized or spread, not 'central'"),
        ({"pattern_records": 10_001}, "pattern_records must be at most the 10000 images, not 10001"),
        ({"users": 1_000_000, "records_per_user": 10}, "must be at most 1,000,000, not 10,000,000"),
        ({"records_per_user": 0}, "records_per_user must be a whole number of images from 1 to 10,000, not 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(**options)
