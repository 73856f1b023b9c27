"""MNIST by writer: the real counts, and files that are absent, damaged, or of other digits."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import QMNIST

from dpbench.data import ImageDataModule, UserDataModule
from dpbench.data.sources import SOURCES, Images
from dpbench.errors import ConfigurationError, DataError

Write = Callable[..., Path]


def load(root: Path, download: bool = False, **options: Any) -> UserDataModule:
    common = {"root": str(root), "expected_batch_size": 2, "download": download}
    data = UserDataModule("mnist_writers", **common, options=options)
    data.setup()
    return data


def digits(root: Path, split: str, download: bool) -> Images:
    size = {"train": 12, "test": 6}[split]
    pixels = torch.arange(size * 784, dtype=torch.uint8).reshape(size, 28, 28, 1)
    return Images(pixels, torch.arange(size) % 10)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A function that writes QMNIST's labels; those of a small MNIST are there."""

    def write(split: str, writers: list[int], first: int = 0) -> Path:
        rows = np.zeros((len(writers), 8), dtype=">i4")
        rows[:, 0], rows[:, 2] = np.arange(first, first + len(writers)) % 10, writers
        content = gzip.compress(bytes(12) + rows.tobytes())
        path = tmp_path / "QMNIST" / "raw" / f"qmnist-{split}-labels-idx2-int.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        images, (url, _) = QMNIST.resources[split]
        resource = [images, (url, hashlib.md5(content).hexdigest())]
        monkeypatch.setattr(QMNIST, "resources", {**QMNIST.resources, split: resource})
        return path

    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], load=digits))
    write("train", [7, 7, 9, 9, 9, 9, 7, 7, 8, 8, 8, 8])
    write("test", [1, 1, 1, 2, 2, 2, 3, 3])
    return write


def test_real_writers(data_folder: Path) -> None:
    data = UserDataModule("mnist_writers", root=str(data_folder), expected_batch_size=50, download=False)
    train, test = data.users, data.test_users
    assert test is not None and not set(train.names) & set(test.names)
    assert (len(train), train.sizes.sum(), train.sizes.min(), train.sizes.max()) == (539, 60_000, 19, 131)
    assert (len(test), test.sizes.sum(), test.sizes.min(), test.sizes.max()) == (297, 10_000, 8, 130)


def test_writers_of_a_small_file(write: Write, tmp_path: Path) -> None:
    data = load(tmp_path)
    assert data.users.names == [7, 8, 9] and data.users.sizes.tolist() == [4, 4, 4]
    assert data.users.batch(0, [0, 3])[1].tolist() == [0, 7]
    assert data.test_users is not None and data.test_users.names == [1, 2]  # not those beyond MNIST's test digits
    assert data.model_options() == {"input_shape": (1, 28, 28), "num_classes": 10}


def test_scale(write: Write, tmp_path: Path) -> None:
    unit, standard = (load(tmp_path, scale=scale).users.batch(0, [0])[0] for scale in ("unit", "standard"))
    assert torch.allclose((unit - 0.1307) / 0.3081, standard, atol=1e-5)


def test_features_are_those_of_the_same_digits_by_example(write: Write, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"features": "mirrored_scattering", "image_size": 32}
    users = load(tmp_path, **chosen)
    examples = ImageDataModule("mnist", root=str(tmp_path), expected_batch_size=2, download=False, **chosen)
    assert users.model_options() == {"input_shape": (81, 8, 4), "num_classes": 10} == examples.model_options()
    assert torch.equal(users.users.examples.pixels, examples.train_set.pixels)
    with pytest.raises(ConfigurationError, match="takes pixels as they are: keep data.options.scale=unit"):
        load(tmp_path, features="scattering", scale="standard")


BROKEN: dict[str, Callable[[Write], object]] = {
    "qmnist-test-labels-idx2-int.gz is not in .*QMNIST/raw, and data.download is false. Copy it there": (
        lambda write: write("test", [1]).unlink()
    ),
    "qmnist-train-labels-idx2-int.gz is damaged .wrong md5 sum.: delete it": (
        lambda write: write("train", [7]).write_bytes(b"cut")
    ),
    "the train labels of MNIST and QMNIST in .* differ": lambda write: write("train", [7] * 12, first=1),
    "1 writers of QMNIST have training and test digits": lambda write: write("test", [8] * 6),
}


@pytest.mark.parametrize("message", BROKEN)
def test_bad_files_are_one_clear_line(write: Write, tmp_path: Path, message: str) -> None:
    BROKEN[message](write)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_download_that_fails_says_so(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise OSError("no network\nat all")

    write("train", [7]).unlink()
    monkeypatch.setattr("torchvision.datasets.utils.download_url", fails)
    with pytest.raises(DataError, match=r"and downloading failed \(no network\). Copy it there"):
        load(tmp_path, download=True)
