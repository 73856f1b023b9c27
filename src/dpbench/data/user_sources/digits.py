"""`digits_users`: scikit-learn's digits, dealt to users who never were."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpbench.data.images import Side, normalize
from dpbench.data.sources import SOURCES
from dpbench.data.user_data import UserData, by_users
from dpbench.data.user_sources.allocation import Concentration, Seed, Users, allocate, uneven_sizes
from dpbench.data.user_sources.labeled import image_options
from dpbench.data.users import UserDataset


@by_users("digits_users")
def load_digits(
    root: Path,
    download: bool,
    users: Users = 100,
    alpha: Concentration = 1.0,
    seed: Seed = 0,
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
    user_of = allocate(train.labels.numpy(), uneven_sizes(len(train), users, rng), alpha, rng)
    return UserData(
        UserDataset(train, user_of, range(users)),
        test,
        "rows",
        **image_options(train, spec),
    )
