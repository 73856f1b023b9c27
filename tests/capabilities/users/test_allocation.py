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
    with pytest.raises(ConfigurationError, match="at most the number of examples, 7, not 8"):
        uneven_sizes(7, 8, np.random.default_rng(0))


def test_each_user_gets_its_number_and_each_example_goes_once() -> None:
    labels = np.repeat(np.arange(3), [10, 100, 1])
    user_of = allocate(labels, [37] * 3, 1e-3, np.random.default_rng(1))  # all weight on one class at a time
    assert np.bincount(user_of[user_of >= 0]).tolist() == [37] * 3 and len(user_of) == len(labels)


# E[max of Dirichlet(α·1)] over 10 classes, by 10⁶ draws: 0.1 → 0.70, 1 → 0.29, 1,000 → 0.105 (0.15 with 100 draws)
@pytest.mark.parametrize(("alpha", "share", "error"), [(0.1, 0.70, 0.05), (1000.0, 0.155, 0.015)])
def test_concentration_says_how_many_classes_a_user_has(alpha: float, share: float, error: float) -> None:
    labels = np.arange(20_000) % 10
    user_of = allocate(labels, [100] * 100, alpha, np.random.default_rng(0))
    largest = [np.bincount(labels[user_of == user]).max() / 100 for user in range(100)]
    assert np.mean(largest) == pytest.approx(share, abs=error)


def test_the_allocation_of_digits_is_public() -> None:
    """A change of it would change every published run."""
    data = UserDataModule("digits_users")
    users = data.users
    assert data.model_options()["input_shape"] == (1, 28, 28)
    assert users.sizes.sum() == 1437 and len(users) == 100 and users.sizes.min() >= 1
    assert users.sizes[:8].tolist() == [6, 9, 9, 9, 18, 4, 11, 6]
