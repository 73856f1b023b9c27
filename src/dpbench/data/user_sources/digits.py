"""`digits_users`: scikit-learn's digits, dealt to users who never were."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dpbench.data.images import normalize
from dpbench.data.sources import SOURCES
from dpbench.data.user_data import UserData, by_users
from dpbench.data.user_sources.allocation import Concentration, Seed, Users, allocate, uneven_sizes
from dpbench.data.users import UserDataset

Side = Annotated[int, Field(ge=1, le=4096), "a whole number of pixels from 1 to 4096"]


def noise_images(
    size: int, generator: torch.Generator, shape: tuple[int, ...], mean: Tensor, std: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Uniform noise, scaled as images (C, H, W) are, with random labels: what no private data went into."""
    pixels = (torch.rand(size, *shape, generator=generator) - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    return pixels, torch.randint(num_classes, (size,), generator=generator)


@by_users("digits_users")
def load_digits(
    root: Path, download: bool, users: Users = 100, alpha: Concentration = 1.0, seed: Seed = 0, image_size: Side = 28
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
    train, test = (normalize(spec.load(root, split, download), spec, image_size) for split in ("train", "test"))
    rng = np.random.default_rng([1797, seed])
    user_of = allocate(train.labels.numpy(), uneven_sizes(len(train), users, rng), alpha, rng)
    return UserData(
        train=UserDataset(train, user_of, range(users)),
        test=test,
        held_out="rows",
        model_options={"input_shape": (1, image_size, image_size), "num_classes": spec.num_classes},
        noise_batch=partial(
            noise_images,
            shape=(1, image_size, image_size),
            mean=torch.tensor(spec.mean),
            std=torch.tensor(spec.std),
            num_classes=spec.num_classes,
        ),
    )
