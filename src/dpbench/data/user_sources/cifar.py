"""`cifar10_users` and `cifar100_users`: CIFAR dealt to users whose classes differ, and cropped as they train."""

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
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.data.records import Collated
from dpbench.data.sources import SOURCES, Images, load_torchvision
from dpbench.data.user_data import UserData, by_users
from dpbench.data.user_sources.allocation import Concentration, Seed, Users, allocate
from dpbench.data.users import UserDataset
from dpbench.errors import ConfigurationError, DataError

Crop = Annotated[int, Field(ge=1, le=32), "a whole number of pixels from 1 to 32"]
Flag = Annotated[bool, "true or false"]


class CroppedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images kept as bytes; each batch is cropped and standardized when it is asked for.

    An image is scaled to mean 0 and deviation 1 by itself (over its pixels and channels, after the crop; the
    deviation at least 1/√pixels), as TensorFlow's `per_image_standardization` does.

    Args:
        images: (N, H, W, C), uint8.
        crop: Side of the part that is kept.
        augment: Whether crops lie anywhere and half of them are mirrored, by torch's global generator; else they lie
            in the middle.
    """

    def __init__(
        self,
        images: Images,
        crop: int,
        augment: bool,
    ) -> None:
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

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Image (C, crop, crop) and label ()."""
        images, labels = self.__getitems__([range(len(self))[position]]).batch
        return images[0], labels[0]

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        """Images (R, C, crop, crop), channels-last in memory, and labels (R,)."""
        index = torch.as_tensor(positions, dtype=torch.long)
        height, width = self.pixels.shape[1:3]
        along = torch.arange(self.crop).expand(len(index), -1)
        if self.augment:
            top = torch.randint(height - self.crop + 1, (len(index), 1))
            left = torch.randint(width - self.crop + 1, (len(index), 1))
            mirrored = torch.rand(len(index), 1) < 0.5
            rows = top + along
            columns = left + torch.where(mirrored, self.crop - 1 - along, along)
        else:
            rows = (height - self.crop) // 2 + along
            columns = (width - self.crop) // 2 + along
        pixels = self.pixels[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return Collated((standardized(pixels).permute(0, 3, 1, 2), self.labels[index]))


def standardized(pixels: Tensor) -> Tensor:
    """Each image (R, H, W, C) with mean 0 and deviation 1 by itself."""
    flat = pixels.flatten(1).float()
    flat = flat - flat.mean(1, keepdim=True)
    deviation = flat.square().mean(1, keepdim=True).sqrt()
    return (flat / deviation.clamp_min(flat.shape[1] ** -0.5)).view(pixels.shape)


def _noise(
    size: int,
    generator: torch.Generator,
    crop: int,
    num_classes: int,
) -> tuple[Tensor, Tensor]:
    """Uniform noise with random labels, standardized as the images are: what needs no budget to look at."""
    pixels = torch.randint(256, (size, crop, crop, 3), generator=generator)
    return standardized(pixels).permute(0, 3, 1, 2), torch.randint(
        num_classes,
        (size,),
        generator=generator,
    )


@by_users("cifar10_users")
def load_cifar10(
    root: Path,
    download: bool,
    users: Users = 500,
    alpha: Concentration = 0.1,
    seed: Seed = 0,
    crop: Crop = 24,
    augment: Flag = True,
) -> UserData:
    """CIFAR-10 dealt to users of equal size whose classes differ (Dirichlet, Hsu et al. 2019); test: CIFAR-10's own.

    Args:
        root: Folder of the data sets.
        download: Whether torchvision may download it.
        users: Number of users; each has 50,000 / `users` images, rounded down.
        alpha: Concentration of a user's classes; small: few classes each.
        seed: Of the allocation, which is public.
        crop: Side of the crops, see `CroppedImages`.
        augment: Whether training crops lie anywhere and are mirrored.
    """
    train, test = (SOURCES["cifar10"].load(root, split, download) for split in ("train", "test"))
    user_of = _dealt(train, users, alpha, seed, None)
    return _user_data(train, test, user_of, users, crop, augment, 10)


@by_users("cifar100_users")
def load_cifar100(
    root: Path,
    download: bool,
    users: Users = 500,
    alpha: Concentration = 0.1,
    beta: Concentration = 10.0,
    seed: Seed = 0,
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
    train, test = (load_torchvision("CIFAR100", root, split, download) for split in ("train", "test"))
    coarse = _coarse_of_fine(root / "cifar-100-python" / "train", train.labels.numpy())
    user_of = _dealt(train, users, alpha, seed, coarse, beta)
    return _user_data(train, test, user_of, users, crop, augment, 100)


def _dealt(
    train: Images,
    users: int,
    alpha: float,
    seed: int,
    coarse: NDArray[np.int64] | None,
    beta: float = 10.0,
) -> NDArray[np.int64]:
    rows = len(train.labels) // users
    if not rows:
        raise ConfigurationError(
            f"data.options.users must be at most the number of examples, {len(train.labels)}, not {users}."
        )
    rng = np.random.default_rng([2021, seed])
    return allocate(train.labels.numpy(), np.full(users, rows), alpha, rng, coarse, beta)


def _coarse_of_fine(path: Path, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The coarse class of each fine one, from the archive, whose md5 sum torchvision has checked."""
    try:
        entry: dict[str, Any] = pickle.loads(path.read_bytes(), encoding="latin1")
        given = np.asarray(entry["coarse_labels"], dtype=np.int64)
        coarse = np.zeros(labels.max() + 1, dtype=np.int64)
        coarse[labels] = given
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{path} does not give each image a coarse label: it is no archive of CIFAR-100.") from error
    if not np.array_equal(coarse[labels], given):
        raise DataError(f"{path} gives images of one class different coarse labels: it is no archive of CIFAR-100.")
    return coarse


def _user_data(
    train: Images,
    test: Images,
    user_of: NDArray[np.int64],
    users: int,
    crop: int,
    augment: bool,
    num_classes: int,
) -> UserData:
    kept = np.flatnonzero(user_of >= 0)
    dealt = Images(train.pixels[kept], train.labels[kept]) if len(kept) < len(user_of) else train
    return UserData(
        train=UserDataset(CroppedImages(dealt, crop, augment), user_of[kept], range(users)),
        test=CroppedImages(test, crop, False),
        held_out="rows",
        model_options={"input_shape": (3, crop, crop), "num_classes": num_classes},
        noise_batch=partial(_noise, crop=crop, num_classes=num_classes),
    )
