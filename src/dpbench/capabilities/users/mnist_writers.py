"""`mnist_writers`: MNIST by the writer of each digit, from the labels of QMNIST."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.capabilities.users.sources import UserData, by_users
from dpbench.data.images import FEATURES, FeaturesName, Side, image_options, normalize
from dpbench.data.noise import Split
from dpbench.data.sources import SOURCES
from dpbench.errors import ConfigurationError, DataError, brief

# Columns of a label.
_CLASS = 0
_WRITER = 2


@by_users("mnist_writers")
def load_mnist_writers(
    root: Path,
    download: bool,
    scale: Literal["unit", "standard"] = "unit",
    features: FeaturesName | None = None,
    image_size: Side | None = None,
) -> UserData:
    """MNIST's 60,000 digits by their 539 writers; its 10,000 test digits are of 297 other writers.

    MNIST itself does not name the writers; Yadav and Bottou 2019 (Cold Case: The Lost MNIST Digits) found them
    again, and QMNIST's labels name the writers. A writer has 19 to 131 training digits.

    Args:
        root: Folder with MNIST/raw and QMNIST/raw, as torchvision names them; of QMNIST the labels only.
        download: True to download an absent data set.
        scale: "unit" (pixels in [0, 1]) or "standard" (mean 0, deviation 1, as data=mnist).
        features: "scattering", "color_scattering" or "mirrored_scattering" replaces pixels by wavelet features, as with
            data=mnist; scale is then "unit".
        image_size: Side to which images are resized; None: 28.

    Raises:
        ConfigurationError: Features are asked for of pixels that are scaled.
        DataError: A file is absent or damaged, or MNIST and QMNIST are not of the same digits.
    """
    if features is not None and scale != "unit":
        raise ConfigurationError(
            f"data.options.features={features} takes pixels as they are: keep data.options.scale=unit, or remove the "
            "features."
        )
    spec = SOURCES["mnist"]
    make_features = None if features is None else FEATURES[features]
    sides = {}
    for split in ("train", "test"):
        images = spec.load(root, split, download)
        labels = qmnist_labels(root, split, download)
        labels = labels[: len(images.labels)]  # of the test digits 10,000 of 60,000 are MNIST's
        if not np.array_equal(labels[:, _CLASS], images.labels.numpy()):
            raise DataError(
                f"the {split} labels of MNIST and QMNIST in {root} differ, so that the writers are those of other "
                "digits: take both as torchvision downloads them."
            )
        sides[split] = UserDataset(normalize(images, spec, image_size, scale, make_features), labels[:, _WRITER])
    train = sides["train"]
    test = sides["test"]
    if both := set(train.names) & set(test.names):
        raise DataError(f"{len(both)} writers of QMNIST have training and test digits: these are not QMNIST's labels.")
    return UserData(
        train=train,
        test=test.examples,
        test_users=test,
        **image_options(train.examples, spec, scale, make_features, image_size),  # type: ignore[arg-type]
    )


def qmnist_labels(root: Path, split: Split, download: bool) -> NDArray[np.int64]:
    """The labels of QMNIST: class, series and writer of each digit, and five other numbers.

    Args:
        root: Folder of the data sets.
        split: "train" (the digits of MNIST) or "test" (of which the first 10,000 are MNIST's).
        download: True to let torchvision download them.

    Returns:
        (digits, 8).

    Raises:
        DataError: They are absent and cannot be downloaded, or damaged.
    """
    from torchvision.datasets import QMNIST
    from torchvision.datasets.utils import check_integrity, download_url

    url, md5 = QMNIST.resources[split][1]
    path = root / "QMNIST" / "raw" / url.rsplit("/", maxsplit=1)[1]
    if not path.exists():
        reason = "data.download is false"
        if download:
            try:
                download_url(url, path.parent, md5=md5)
                reason = ""
            except Exception as error:
                reason = f"downloading failed ({brief(error)})"
        if reason:
            raise DataError(
                f"{path.name} is not in {path.parent}, and {reason}. Copy it there, point data.root or $DPBENCH_DATA "
                "at the folder that holds QMNIST, or use data=digits_users, which needs no files."
            )
    if not check_integrity(path, md5):
        raise DataError(f"{path} is damaged (wrong md5 sum): delete it to have it downloaded again.")
    # Eight integers a digit, after a head of twelve bytes; the md5 sum says that they are all there.
    content = gzip.decompress(path.read_bytes())
    return np.frombuffer(content, dtype=">i4", offset=12).reshape(-1, 8).astype(np.int64)
