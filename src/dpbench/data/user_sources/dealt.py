"""Data sets dealt to users who never were: `digits_users` and `cifar100_users`.

Who has which examples is seeded, public, and as uneven as wanted.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from dpbench.data.images import Side, image_options, normalize, standardized
from dpbench.data.noise import labeled_noise
from dpbench.data.records import Collated, InBatches
from dpbench.data.sources import SOURCES, Images
from dpbench.data.user_data import UserData, by_users
from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError
from dpbench.options import Count

Users = Annotated[int, Field(ge=1, le=10_000_000), "a whole number of users from 1 on"]
Concentration = Annotated[float, Field(gt=0, le=1e6), "a number above 0, at most 1e6"]
Crop = Annotated[int, Field(ge=1, le=32), "a whole number of pixels from 1 to 32"]
Flag = Annotated[bool, "true or false"]


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
        raise _too_many_users(examples, users)
    # One each first: a user without an example would be drawn into lots, and give nothing.
    sizes = 1 + rng.multinomial(examples - users, rng.dirichlet(np.full(users, evenness)))
    return np.asarray(sizes, dtype=np.int64)


def _too_many_users(examples: int, users: int) -> ConfigurationError:
    return ConfigurationError(f"data.options.users must be at most the number of examples, {examples}, not {users}.")


def allocate(
    labels: NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    alpha: float,
    rng: np.random.Generator,
    coarse: NDArray[np.int64] | None = None,
    beta: float = 10.0,
) -> NDArray[np.int64]:
    """Deal examples to users whose classes differ, without replacement.

    This is the Pachinko allocation of Reddi et al. 2021 (Adaptive Federated Optimization, appendix).
    Each user draws its own distribution over the coarse classes from Dirichlet(α), and within each of these one over
    its fine classes from Dirichlet(β). Its examples are drawn one by one: a coarse class, a fine one, an example of it
    that is still there; a class that is used up is left out from then on, and the rest scaled up. Without coarse
    classes it is the allocation of Hsu et al. 2019.

    Args:
        labels: Of the examples, (N,), from 0 on.
        sizes: Number of examples of each user; at most N together.
        alpha: Concentration over the (coarse) classes; small: few classes a user.
        rng: Source of the draws.
        coarse: The coarse class of each fine class; None: each class by itself.
        beta: Concentration over the fine classes of a coarse one.

    Returns:
        The user of each example, (N,); −1 for those that nobody got.
    """
    classes = np.arange(labels.max() + 1)
    coarse = classes if coarse is None else coarse
    children = [np.flatnonzero(coarse == parent) for parent in range(coarse.max() + 1)]
    # Shuffled once, so that the last of a pile is a random example of its class.
    piles = [rng.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    counts = np.bincount(labels)
    user_of = np.full(len(labels), -1, dtype=np.int64)
    for user, size in enumerate(sizes):
        top = rng.dirichlet(np.full(len(children), alpha))
        below = [rng.dirichlet(np.full(len(fine), beta)) for fine in children]
        # Two draws an example: of the coarse class and of the fine one.
        for uniform in rng.random((size, 2)):
            parent = _draw(top, np.array([counts[fine].sum() for fine in children]), uniform[0])
            fine = children[parent]
            label = fine[_draw(below[parent], counts[fine], uniform[1])]
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


class CroppedImages(InBatches):
    """Images kept as bytes; each batch is cropped and standardized (`images.standardized`) when it is asked for.

    Args:
        images: (N, H, W, C), uint8.
        crop: Side of the part that is kept.
        augment: Whether crops lie anywhere and half of them are mirrored, by torch's global generator; else they lie
            in the middle.
    """

    def __init__(self, images: Images, crop: int, augment: bool) -> None:
        self.pixels = images.pixels.contiguous()
        self.labels = images.labels
        self.crop = crop
        self.augment = augment

    @property
    def plain(self) -> CroppedImages:
        """The same images as they are for an evaluation."""
        return CroppedImages(Images(self.pixels, self.labels), self.crop, False)

    def __len__(self) -> int:
        return len(self.labels)

    def batch_of(self, positions: Sequence[int]) -> Collated:
        """Return the batch of some records, a tuple of tensors."""
        """Images (R, C, crop, crop), channels-last in memory, and labels (R,)."""
        index = torch.as_tensor(positions, dtype=torch.long)
        height, width = self.pixels.shape[1:3]
        offsets = torch.arange(self.crop).expand(len(index), -1)
        if self.augment:
            # Rows, columns, mirrors: seeded runs draw them in this order.
            first_rows = torch.randint(height - self.crop + 1, (len(index), 1))
            first_columns = torch.randint(width - self.crop + 1, (len(index), 1))
            is_mirrored = torch.rand(len(index), 1) < 0.5
            rows = first_rows + offsets
            columns = first_columns + torch.where(is_mirrored, offsets.flip(1), offsets)
        else:
            rows = (height - self.crop) // 2 + offsets
            columns = (width - self.crop) // 2 + offsets
        pixels = self.pixels[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return Collated((standardized(pixels).permute(0, 3, 1, 2), self.labels[index]))


@by_users("cifar100_users")
def load_cifar100(
    root: Path,
    download: bool,
    users: Users = 500,
    alpha: Concentration = 0.1,
    beta: Concentration = 10.0,
    seed: Count = 0,
    crop: Crop = 24,
    augment: Flag = True,
) -> UserData:
    """CIFAR-100 dealt to users by Pachinko allocation, as for TensorFlow Federated's; test: CIFAR-100's own.

    The scheme is TensorFlow Federated's (Reddi et al. 2021), the draws are not: its users are others.

    Args:
        root: Folder of the data sets.
        download: Whether torchvision may download it.
        users: Number of users; each has 50,000 / `users` images, rounded down.
        alpha: Concentration of a user's 20 coarse classes; small: few of them each.
        beta: Concentration of the five fine classes within a coarse one.
        seed: Of the allocation, which is public.
        crop: Side of the crops, see `CroppedImages`.
        augment: Whether training crops lie anywhere and are mirrored.
    """
    train = SOURCES["cifar100"].load(root, "train", download)
    test = SOURCES["cifar100"].load(root, "test", download)
    labels = train.labels.numpy()
    size = len(labels) // users
    if not size:
        raise _too_many_users(len(labels), users)
    coarse = _coarse_of_fine(root / "cifar-100-python" / "train", labels)
    user_of = allocate(labels, np.full(users, size), alpha, np.random.default_rng([2021, seed]), coarse, beta)
    dealt = np.flatnonzero(user_of >= 0)
    if len(dealt) < len(user_of):
        train = Images(train.pixels[dealt], train.labels[dealt])
    num_classes = SOURCES["cifar100"].num_classes
    return UserData(
        train=UserDataset(CroppedImages(train, crop, augment), user_of[dealt], range(users)),
        test=CroppedImages(test, crop, False),
        model_options={"input_shape": (3, crop, crop), "num_classes": num_classes},
        noise_batch=partial(
            labeled_noise,
            shape=(crop, crop, 3),
            num_classes=num_classes,
            prepare=standardized,
            as_bytes=True,
        ),
    )


def _coarse_of_fine(path: Path, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The coarse class of each fine one, from the archive, whose md5 sum torchvision has checked."""
    entry: dict[str, Any] = pickle.loads(path.read_bytes(), encoding="latin1")
    coarse = np.zeros(labels.max() + 1, dtype=np.int64)
    coarse[labels] = entry["coarse_labels"]
    return coarse
