"""Made-up users: `digits_users`, to whom digits are dealt, and `user_noise`, with images of noise.

The allocation of digits is seeded, public, and as uneven as wanted. In some of the images of noise there is a pattern
(three_tools_2018, Fig. 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.sources import UserData, by_users
from dpbench.data.images import InMemoryImages, Side, image_options, normalize
from dpbench.data.sources import SOURCES, Images, Source
from dpbench.errors import ConfigurationError
from dpbench.options import Count

PATTERN_CLASS = 1
_SIDE = 28
_PATTERN = 14
_CLASSES = 10
_FRESH = 1000
_MOST = 1_000_000  # images, of 3 KB each
_SPEC = Source(
    SOURCES["random_noise"].load,
    (0.5,),
    (12**-0.5,),
    _CLASSES,
)  # one channel, of uniform noise

Users = Annotated[int, Field(ge=1, le=10_000_000), "a whole number of users of at least 1"]
Concentration = Annotated[float, Field(gt=0, le=1e6), "a number above 0, at most 1e6"]
Records = Annotated[int, Field(ge=1, le=10_000), "a whole number of images from 1 to 10,000"]


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
    """Deal examples to users with different classes, without replacement (Hsu et al. 2019).

    Each user draws its own distribution over the classes from Dirichlet(α). Its examples are drawn one by one: a class,
    and an example of it that is still there; a class that is used up is left out from then on, and the rest scaled up.

    Args:
        labels: Labels of the examples, (N,), from 0 on.
        sizes: Number of examples of each user; at most N together.
        alpha: Concentration over the classes; small: few classes a user.
        rng: Source of the draws.

    Returns:
        The user of each example, (N,); −1 for those left over.
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

    The users are made up: the writers of these digits are not known. Each has classes of its own
    (Dirichlet(`alpha`)) and a size of its own, at least one digit. Test digits are those of data=digits.

    Args:
        root: Not used.
        download: Not used.
        users: Number of users, at most 1,437.
        alpha: Concentration of a user's classes; small: few classes each.
        seed: Seed of the allocation, which is public.
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


@by_users("user_noise")
def load_noise(
    root: Path,
    download: bool,
    users: Users = 1000,
    records_per_user: Records = 10,
    pattern: Literal["centralized", "spread"] = "centralized",
    pattern_records: Count = 10,
    seed: Count = 0,
    scale: Literal["unit", "standard"] = "standard",
) -> UserData:
    """Users with 28×28 images of uniform noise, all of a user with one random label; a pattern in some of them.

    The pattern: the pixels of the upper left 14×14 are 1, and the label is 1. Test images are fresh noise with the
    pattern, so that the test accuracy is the share of them that are called 1: whether the pattern was learned.
    Validation images are the same noise without it, also labeled 1, so that the validation accuracy is the base rate:
    how much noise is called 1 anyway. Both are public.

    Args:
        root: Not used.
        download: Not used.
        users: Number of users.
        records_per_user: Images of each.
        pattern: "centralized": in all images of as few users as possible, drawn at random (of the last of them,
            perhaps, in some images); "spread": in images that are drawn from all of them.
        pattern_records: Number of images with the pattern (N_p).
        seed: Seed of noise, labels, and the users or images with the pattern.
        scale: "standard" (noise of mean 0 and deviation 1; the 2NN then memorizes it within 60 cohorts of 100) or
            "unit" (pixels in [0, 1], as the paper has them; it did not within as many).

    Raises:
        ConfigurationError: There are fewer images than shall have the pattern, or too many for the memory.
    """
    total = users * records_per_user
    if total > _MOST:
        raise ConfigurationError(f"data.options.users × records_per_user must be at most {_MOST:,}, not {total:,}.")
    if pattern_records > total:
        raise ConfigurationError(
            f"data.options.pattern_records must be at most the {total} images, not {pattern_records}."
        )
    rng = np.random.default_rng([2018, seed])
    pixels = _noise(total, rng)
    labels = np.repeat(rng.integers(_CLASSES, size=users), records_per_user)
    if pattern == "centralized":
        order = (rng.permutation(users)[:, None] * records_per_user + np.arange(records_per_user)).reshape(-1)
    else:
        order = rng.permutation(total)
    chosen = order[:pattern_records]
    pixels[chosen, :_PATTERN, :_PATTERN] = 1.0
    labels[chosen] = PATTERN_CLASS
    plain = _noise(_FRESH, rng)
    marked = plain.copy()
    marked[:, :_PATTERN, :_PATTERN] = 1.0
    train = _images(pixels, labels, scale)
    return UserData(
        train=UserDataset(train, np.repeat(np.arange(users), records_per_user)),
        val=_images(plain, None, scale),
        test=_images(marked, None, scale),
        **image_options(train, _SPEC, scale),
    )


def _noise(size: int, rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.random((size, _SIDE, _SIDE), dtype=np.float32)


def _images(
    pixels: NDArray[np.float32],
    labels: NDArray[np.int64] | None,
    scale: str,
) -> InMemoryImages:
    labels = np.full(len(pixels), PATTERN_CLASS) if labels is None else labels
    images = Images(torch.from_numpy(pixels).unsqueeze(-1), torch.from_numpy(labels))
    return normalize(images, _SPEC, None, scale)
