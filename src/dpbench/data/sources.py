"""The data sets, as whole arrays: where they are found, how they are downloaded, how they are scaled.

Pixel means and standard deviations are the published constants; nothing is computed from private data here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dpbench.data.noise import NOISE_SIZES, Split, noise_split
from dpbench.errors import ConfigurationError, DataError, brief

NOISE = "random_noise"
"""Name of the data set that is made up."""
_PLUGINS = "dpbench.images"
"""Group of entry points: a name, and its `Source`."""


@dataclass(frozen=True)
class Images:
    """A split as it lies on disk.

    Attributes:
        pixels: (N, H, W, C); uint8, or float32 in [0, 1].
        labels: (N,), int64.
    """

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """Named data set of images: its loading function and facts of its images.

    Attributes:
        load: (folder, split, download) → images.
        mean: Mean of each channel, of pixels in [0, 1].
        std: Standard deviation of each channel, of pixels in [0, 1].
        num_classes: Number of classes.
        side: Side of an image, in pixels; those of another side are resized to it by default (bilinear).
    """

    load: Callable[[Path, Split, bool], Images]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int = 10
    side: int = 28


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """Folder of the data sets: `root`, else $DPBENCH_DATA, else a per-user cache folder."""
    if root is None:
        root = os.environ.get("DPBENCH_DATA", "").strip() or None  # empty: not set, and not the current folder
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = Path(cache) / "dpbench"
    return Path(root).expanduser()


def find_file(root: Path, path: str) -> Path:
    """Find a file of the user's: a relative path in the working directory first, and then in `root`.

    Raises:
        DataError: A relative path is in neither folder.
    """
    name = Path(path).expanduser()
    places = [Path.cwd() / name, root / name]
    for file in places:
        if name.is_absolute() or file.exists():
            return file
    raise DataError(
        f"there is no file {places[0]}, and no {places[1]}: a relative path is looked for in the working directory, "
        "and then in the folder of the data sets (data.root, $DPBENCH_DATA)."
    )


def _digits(root: Path, split: Split, download: bool) -> Images:
    """scikit-learn's 1,797 real handwritten digits (8×8), split 1,437 / 360 by class; part of the package."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    positions = train_test_split(
        np.arange(len(data.target)),
        test_size=360,
        random_state=0,
        stratify=data.target,
    )
    chosen = np.sort(positions[0 if split == "train" else 1])
    pixels = torch.from_numpy(data.images[chosen] / 16).float().unsqueeze(-1)
    return Images(pixels, torch.from_numpy(data.target[chosen]).long())


def noise_like(
    like: Source,
    train_size: int | None = None,
    test_size: int | None = None,
) -> Source:
    """Uniform noise with random labels, which can only be memorized (three_tools_2018, section 2.1).

    The first images and labels are the same for any number of them.

    Args:
        like: The data set with the sides, channels and classes of these images.
        train_size: Number of training images; None: 50,000.
        test_size: Number of test images; None: 10,000.
    """
    channels = len(like.mean)
    sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}

    def load(root: Path, split: Split, download: bool) -> Images:
        shape = (sizes[split] or NOISE_SIZES[split], like.side, like.side, channels)
        pixels, labels = noise_split(split, shape, like.num_classes)
        return Images(torch.from_numpy(pixels), torch.from_numpy(labels))

    return Source(
        load,
        mean=(0.5,) * channels,
        std=(0.2887,) * channels,
        num_classes=like.num_classes,
        side=like.side,
    )


def load_torchvision(
    class_name: str,
    root: Path,
    split: Split,
    download: bool,
) -> Images:
    """Load a split of a data set of labeled images that torchvision has a class for.

    Raises:
        DataError: It is absent and cannot be downloaded, or damaged.
    """
    from torchvision import datasets

    dataset = getattr(datasets, class_name)
    folder = root / (getattr(dataset, "base_folder", None) or f"{class_name}/raw")
    data = _open(partial(dataset, root, train=split == "train"), class_name, folder, download)
    pixels = torch.as_tensor(data.data)
    if pixels.dim() == 3:
        pixels = pixels.unsqueeze(-1)
    labels = torch.as_tensor(data.targets).long()
    num_classes = len(data.classes)
    flaw = ""
    if len(pixels) != len(labels):
        flaw = f"{len(pixels)} images have {len(labels)} labels"
    elif not len(labels):
        flaw = "it contains no images"
    elif labels.min() < 0 or labels.max() >= num_classes:
        flaw = f"labels run from {int(labels.min())} to {int(labels.max())}, not from 0 to {num_classes - 1}"
    if flaw:
        raise _damaged(class_name, folder, f"{split} data: {flaw}")
    return Images(pixels, labels)


def load_svhn(root: Path, split: Split, download: bool) -> Images:
    """Load a split of the street view house numbers (Netzer et al. 2011), cropped to single digits.

    The 531,131 easier digits of the third file, `extra`, are not used. The class of digit 0 is 0, as in torchvision.

    Raises:
        DataError: It is absent and cannot be downloaded, or damaged.
    """
    from torchvision.datasets import SVHN

    folder = root / "SVHN"
    data = _open(partial(SVHN, folder, split=split), "SVHN", folder, download)
    pixels = torch.from_numpy(data.data).permute(0, 2, 3, 1).contiguous()
    # Of a file of one record torchvision makes a label without a dimension.
    return Images(pixels, torch.from_numpy(data.labels.reshape(-1)))


def _open(make: Callable[..., Any], name: str, folder: Path, download: bool) -> Any:
    """Open a torchvision data set by `make(download=...)`, downloading it only where nothing of it is there."""
    if folder.is_dir() and any(folder.iterdir()):
        try:
            return make(download=False)
        except Exception as error:
            raise _damaged(name, folder, brief(error)) from error
    reason = "data.download is false"
    if download:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            return make(download=True)
        except Exception as error:
            reason = f"downloading failed ({brief(error)})"
    raise DataError(
        f"{name} is not in {folder}, and {reason}. Copy it to that folder, point data.root or $DPBENCH_DATA at the "
        "folder that holds it, or use data=digits, which needs no files."
    )


def _damaged(name: str, folder: Path, reason: str) -> DataError:
    return DataError(
        f"{name} in {folder} is incomplete or damaged ({reason}): "
        "delete that folder and let torchvision download it again, or copy an intact one there."
    )


SOURCES: dict[str, Source] = {
    "digits": Source(_digits, (0.3053,), (0.3760,)),
    "mnist": Source(partial(load_torchvision, "MNIST"), (0.1307,), (0.3081,)),
    "fashion_mnist": Source(partial(load_torchvision, "FashionMNIST"), (0.2860,), (0.3530,)),
    "cifar10": Source(
        partial(load_torchvision, "CIFAR10"),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        side=32,
    ),
    "cifar100": Source(
        partial(load_torchvision, "CIFAR100"),
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
        num_classes=100,
        side=32,
    ),
    "svhn": Source(
        load_svhn,
        (0.4377, 0.4438, 0.4728),
        (0.1980, 0.2010, 0.1970),
        side=32,
    ),
}
# Noise takes the shape of another data set, so that it comes after them.
SOURCES[NOISE] = noise_like(SOURCES["cifar10"])


def source(name: str) -> Source:
    """The data set of a name.

    Raises:
        ConfigurationError: There is none.
    """
    if name in SOURCES:
        return SOURCES[name]
    for entry in entry_points(group=_PLUGINS, name=name):
        return cast(Source, entry.load())
    raise ConfigurationError(f"unknown data set {name!r}; known are {', '.join(source_names())}.")


def source_names() -> list[str]:
    """Names of all data sets of images, those of plug-ins last."""
    return [*SOURCES, *sorted(entry_points(group=_PLUGINS).names)]
