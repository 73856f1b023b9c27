"""Allocations of examples to users: sizes, what is used up, how uneven, and that they are repeated."""

from __future__ import annotations

import numpy as np
import pytest

from dpbench.capabilities.users.made_up import allocate, uneven_sizes
from dpbench.data import UserDataModule
from dpbench.errors import ConfigurationError


def test_sizes_add_up() -> None:
    sizes = uneven_sizes(500, 40, np.random.default_rng(0))
    assert sizes.sum() == 500 and sizes.min() >= 1 and sizes.std() > 3
    assert uneven_sizes(7, 7, np.random.default_rng(0)).tolist() == [1] * 7
    with pytest.raises(ConfigurationError, match="at most the number of examples, 7, not 8"):
        uneven_sizes(7, 8, np.random.default_rng(0))


def test_each_user_gets_its_number_and_each_example_goes_once() -> None:
    labels = np.arange(600) % 6
    sizes = [50] * 10
    user_of = allocate(labels, sizes, 0.1, np.random.default_rng(0))
    assert np.bincount(user_of[user_of >= 0]).tolist() == sizes
    assert (user_of == -1).sum() == 100


def test_all_examples_may_be_dealt_when_classes_run_out() -> None:
    labels = np.repeat([0, 1, 2], [10, 100, 1])
    user_of = allocate(labels, [37, 37, 37], 1e-3, np.random.default_rng(1))  # all weight on one class at a time
    assert np.bincount(user_of).tolist() == [37, 37, 37]


def test_concentration_says_how_many_classes_a_user_has() -> None:
    labels = np.arange(20_000) % 10

    def largest_share(alpha: float) -> float:
        user_of = allocate(labels, [100] * 100, alpha, np.random.default_rng(0))
        counts = np.zeros((100, 10))
        np.add.at(counts, (user_of[user_of >= 0], labels[user_of >= 0]), 1)
        return float((counts.max(1) / counts.sum(1)).mean())

    # E[max of Dirichlet(α·1)] over 10 classes, by 10⁶ draws: 0.1 → 0.70, 1 → 0.29, 1,000 → 0.105 (0.15 with 100 draws)
    assert largest_share(0.1) == pytest.approx(0.70, abs=0.05)
    assert largest_share(1.0) == pytest.approx(0.30, abs=0.03)
    assert largest_share(1000.0) == pytest.approx(0.155, abs=0.015)


def test_digits_are_dealt_the_same_each_time_and_all_of_them() -> None:
    one, two = (UserDataModule("digits_users", options={"image_size": 8}).users for _ in range(2))
    other = UserDataModule("digits_users", options={"image_size": 8, "seed": 1}).users
    assert one.sizes.sum() == 1437 and len(one) == 100 and one.sizes.min() >= 1 and one.sizes.std() > 5
    assert all((one.rows(user) == two.rows(user)).all() for user in range(100))
    assert one.sizes.tolist() != other.sizes.tolist()
    # The allocation is public: a change of it would change every published run.
    assert one.sizes[:8].tolist() == [6, 9, 9, 9, 18, 4, 11, 6]
