"""Images in a folder for each class."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.records import Rows
from dpbench.errors import DataError, brief

_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})


def class_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, in the order of the alphabet.

    Raises:
        DataError: There are fewer than two, or no folder.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}.")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"{folder} must hold a folder of images for each class, two or more: it has {len(names)}.")
    return names


def read_image_folder(
    folder: Path,
    classes: Sequence[str],
    image_size: int,
    grayscale: bool = False,
) -> UserDataset:
    """Read `folder/class/image.png` into memory, each image as that of a user with no other one.

    Users are named by the class and a hash of the file's contents, so that names of files decide nothing.

    Args:
        folder: Folder that holds a folder for each class.
        classes: Names of these folders, in the order of their numbers.
        image_size: Side to which images are resized (the shorter one, then cropped in the middle).
        grayscale: True to make them gray.

    Returns:
        Images, float32 (C, H, W) in [0, 1], and labels, int64.

    Raises:
        DataError: A class has no folder, a folder is no class, an image cannot be read, or there is none.
    """
    from PIL import Image
    from torchvision.transforms import v2

    if len(set(classes)) < len(classes):
        raise DataError(f"classes= names a folder twice: {list(classes)}.")
    strangers = sorted(set(class_folders(folder)) ^ set(classes))
    if strangers:
        raise DataError(
            f"{folder}: classes and folders differ in {', '.join(strangers)}: name all in data.options.classes, in "
            "one order for training and test."
        )
    mode = "L" if grayscale else "RGB"
    prepare = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(image_size, antialias=True),
            v2.CenterCrop(image_size),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    images = []
    labels = []
    names: list[str] = []
    seen: Counter[str] = Counter()
    for label, name in enumerate(classes):
        for path in sorted((folder / name).rglob("*")):
            if path.suffix.lower() not in _ENDINGS:
                continue
            try:
                digest = f"{name}/{hashlib.sha256(path.read_bytes()).hexdigest()}"
                with Image.open(path) as image:
                    if image.mode.startswith(("I", "F")):
                        raise ValueError(f"mode {image.mode}, more than 8 bits a channel: convert it")
                    images.append(prepare(image.convert(mode)))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise DataError(f"{path} cannot be read as an image ({brief(error)}): remove or replace it.") from error
            labels.append(label)
            seen[digest] += 1
            names.append(f"{digest} {seen[digest]}")
    if not images:
        raise DataError(f"{folder} contains no images ({', '.join(sorted(_ENDINGS))}) in its folders.")
    return UserDataset(Rows(torch.stack(images), torch.tensor(labels)), names)
