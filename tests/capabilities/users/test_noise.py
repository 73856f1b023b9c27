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


def marked(data: UserDataModule) -> list[int]:
    """Number of images with the pattern of each user."""
    found = []
    for user in range(len(data.users)):
        images, labels = data.users.batch(user, range(data.users.sizes[user]))
        patch = (images[:, :, :14, :14] == images[:, :, :14, :14].max()).flatten(1).all(1)
        assert (labels[patch] == 1).all()
        assert (labels[~patch] == labels[~patch][:1]).all()  # one label a user
        found.append(int(patch.sum()))
    return found


def test_thousand_users_with_ten_images() -> None:
    data = load()
    assert len(data.users) == 1000 and set(data.users.sizes.tolist()) == {10}
    assert data.sampling.population == 1000 and data.model_options()["input_shape"] == (1, 28, 28)
    counts = marked(data)
    assert sorted(counts)[-2:] == [0, 10] and sum(counts) == 10
    labels = data.users.examples.labels  # type: ignore[attr-defined]
    assert (torch.bincount(labels, minlength=10) - 1000).abs().max() < 400  # of 100 users each, deviation 95


@pytest.mark.parametrize(
    ("pattern", "records", "counts"), [("centralized", 25, [5, 10, 10]), ("spread", 100, None), ("spread", 0, [])]
)
def test_who_has_the_pattern(pattern: str, records: int, counts: list[int] | None) -> None:
    found = marked(load(pattern=pattern, pattern_records=records))
    assert sum(found) == records
    if counts is not None:
        assert sorted(one for one in found if one) == counts
    else:
        assert max(found) <= 4 and sum(one > 0 for one in found) > 85


def test_the_test_asks_for_the_pattern_and_the_validation_for_the_base_rate() -> None:
    data = load()
    assert data.monitored == "val"
    plain, ones = next(iter(data.val_dataloader()))
    fresh, labels = next(iter(data.test_dataloader()))
    assert plain.shape == fresh.shape == (1000, 1, 28, 28)
    assert (ones == 1).all() and (labels == 1).all()
    assert (fresh[:, :, :14, :14] == 1).all() and torch.equal(fresh[:, :, 14:], plain[:, :, 14:])
    assert abs(float(plain.mean()) - 0.5) < 0.005
    trained = data.users.examples.pixels[:, 20:, 20:, 0].flatten(1)  # type: ignore[attr-defined]
    assert torch.cdist(plain[:50, 0, 20:, 20:].flatten(1), trained[:2000]).min() > 1.0  # none of it is fresh noise


def test_settings_differ_in_the_pattern_only_and_seeds_in_all() -> None:
    central, spread, other = load(), load(pattern="spread"), load(seed=1)
    again = load()
    one, two, three, four = (data.users.examples.pixels for data in (central, spread, other, again))  # type: ignore[attr-defined]
    assert torch.equal(one, four)
    assert torch.equal(one[:, 14:], two[:, 14:]) and not torch.equal(one, two)
    assert not torch.equal(one[:, 14:], three[:, 14:])


def test_standard_noise_is_the_default() -> None:
    pixels = load(scale=None, pattern_records=0).users.examples.pixels  # type: ignore[attr-defined]
    assert abs(float(pixels.mean())) < 0.01 and abs(float(pixels.std()) - 1) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "central"}, "data.options.pattern must be centralized or spread, not 'central'"),
        ({"pattern_records": 10_001}, "pattern_records must be at most the 10000 images, not 10001"),
        ({"pattern_records": -1}, "data.options.pattern_records must be a whole number from 0 on, not -1"),
        ({"users": 1_000_000, "records_per_user": 10}, "must be at most 1,000,000, not 10,000,000"),
        ({"records_per_user": 0}, "records_per_user must be a whole number of images from 1 to 10,000, not 0"),
        ({"seed": -1}, "data.options.seed must be a whole number from 0 on, not -1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load(**options)
    assert "\n" not in str(caught.value)


def test_sizes_are_what_they_say() -> None:
    data = UserDataModule(
        "user_noise", expected_batch_size=3, options={"users": 7, "records_per_user": 4, "pattern_records": 4}
    )
    assert np.array_equal(data.users.sizes, [4] * 7)
