"""`user_noise`: users with images of noise, a pattern in some of them (three_tools_2018, Fig. 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from dpbench.data.images import InMemoryImages, image_options, normalize
from dpbench.data.sources import SOURCES, Images, Source
from dpbench.data.user_data import UserData, by_users
from dpbench.data.user_sources.dealt import Users
from dpbench.data.users import UserDataset
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

Records = Annotated[int, Field(ge=1, le=10_000), "a whole number of images from 1 to 10,000"]


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
        pattern: "centralized": in all images of as few users as that takes, who are drawn (of the last of them,
            perhaps, in some images); "spread": in images that are drawn from all of them.
        pattern_records: Number of images with the pattern (N_p).
        seed: Of noise, labels, and who or what has the pattern.
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
