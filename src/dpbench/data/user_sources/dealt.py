"""`digits_users`: digits dealt to users who never were; who has which is seeded, public, and as uneven as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dpbench.data.images import Side, image_options, normalize
from dpbench.data.sources import SOURCES
from dpbench.data.user_data import UserData, by_users
from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError
from dpbench.options import Count

Users = Annotated[int, Field(ge=1, le=10_000_000), "a whole number of users from 1 on"]
Concentration = Annotated[float, Field(gt=0, le=1e6), "a number above 0, at most 1e6"]


def uneven_sizes(
    examples: int,
    users: int,
    rng: np.random.Generator,
    evenness: float = 2.0,
) -> NDArray[np.int64]:
    """Draw the number of examples of each user: one, and more by a symmetric Dirichlet distribution.

    Raises:
        ConfigurationError: There are more users than examples.
    """
    if users > examples:
        raise ConfigurationError(f"data.options.users must be at most the number of examples, {examples}, not {users}.")
    # One each first: a user without an example would be drawn into lots, and give nothing.
    sizes = 1 + rng.multinomial(examples - users, rng.dirichlet(np.full(users, evenness)))
    return np.asarray(sizes, dtype=np.int64)


def allocate(
    labels: NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    alpha: float,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Deal examples to users whose classes differ, without replacement (Hsu et al. 2019).

    Each user draws its own distribution over the classes from Dirichlet(α). Its examples are drawn one by one: a class,
    and an example of it that is still there; a class that is used up is left out from then on, and the rest scaled up.

    Args:
        labels: Labels of the examples, (N,), from 0 on.
        sizes: Number of examples of each user; at most N together.
        alpha: Concentration over the classes; small: few classes a user.
        rng: Source of the draws.

    Returns:
        The user of each example, (N,); −1 for those that nobody got.
    """
    classes = np.arange(labels.max() + 1)
    # Shuffled once, so that the last of a pile is a random example of its class.
    piles = [rng.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    counts = np.bincount(labels)
    user_of = np.full(len(labels), -1, dtype=np.int64)
    for user, size in enumerate(sizes):
        weights = rng.dirichlet(np.full(len(classes), alpha))
        # Once drawn for classes within classes; without it users would be others than in earlier versions.
        rng.standard_gamma(10.0, len(classes))
        for uniform in rng.random((size, 2))[:, 0]:
            label = _draw(weights, counts, uniform)
            user_of[piles[label].pop()] = user
            counts[label] -= 1
    return user_of


def _draw(weights: NDArray[np.float64], counts: NDArray[np.int64], uniform: float) -> int:
    """Choose a class by weight among those of which examples are there."""
    available = weights * (counts > 0)
    if not available.sum() > 0:  # all weight lay on what is used up
        available = (counts > 0).astype(float)
    # The inverse of the distribution function at the uniform number; the weights need no sum of 1.
    ends = np.cumsum(available)
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))


@by_users("digits_users")
def load_digits(
    root: Path,
    download: bool,
    users: Users = 100,
    alpha: Concentration = 1.0,
    seed: Count = 0,
    image_size: Side = 28,
) -> UserData:
    """1,437 real digits dealt to made-up users, for demonstration and tests; needs no files.

    The users are made up: whoever wrote the digits is not known any more. Each has classes of its own
    (Dirichlet(`alpha`)) and a size of its own, at least one digit. Test digits are those of data=digits.

    Args:
        root: Not used.
        download: Not used.
        users: Number of users, at most 1,437.
        alpha: Concentration of a user's classes; small: few classes each.
        seed: Of the allocation, which is public.
        image_size: Side to which the 8×8 images are resized.
    """
    spec = SOURCES["digits"]
    train = normalize(spec.load(root, "train", download), spec, image_size)
    test = normalize(spec.load(root, "test", download), spec, image_size)
    rng = np.random.default_rng([1797, seed])
    sizes = uneven_sizes(len(train), users, rng)
    user_of = allocate(train.labels.numpy(), sizes, alpha, rng)
    return UserData(
        train=UserDataset(train, user_of, range(users)),
        test=test,
        **image_options(train, spec),
    )
