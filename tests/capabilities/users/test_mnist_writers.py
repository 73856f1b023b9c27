"""MNIST by writer: the real counts, and files that are absent, damaged, or of other digits."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import QMNIST

from dpbench.data import ImageDataModule, UserDataModule
from dpbench.errors import ConfigurationError, DataError


def idx(values: np.ndarray, kind: int) -> bytes:
    """The idx format: 0x08 bytes, 0x0C 32-bit integers, big-endian."""
    header = bytes([0, 0, kind, values.ndim]) + np.array(values.shape, dtype=">i4").tobytes()
    return header + values.astype({0x08: ">u1", 0x0C: ">i4"}[kind]).tobytes()


class Digits:
    """A small MNIST with QMNIST's labels, of which a test breaks what it wants."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._patch = root, monkeypatch
        for name in ("MNIST", "QMNIST"):
            (root / name / "raw").mkdir(parents=True)
        for prefix, size in (("train", 12), ("t10k", 6)):
            pixels = np.random.default_rng(0).integers(0, 256, (size, 28, 28))
            (root / "MNIST" / "raw" / f"{prefix}-images-idx3-ubyte").write_bytes(idx(pixels, 0x08))
            (root / "MNIST" / "raw" / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(size) % 10, 0x08))
        self.write("train", [7, 7, 9, 9, 9, 9, 7, 7, 8, 8, 8, 8])
        self.write("test", [1, 1, 1, 2, 2, 2, 3, 3])

    def path(self, split: str) -> Path:
        return self.root / "QMNIST" / "raw" / f"qmnist-{split}-labels-idx2-int.gz"

    def write(self, split: str, writers: list[int], first: int = 0) -> None:
        """Write labels (QMNIST's eight columns), and have torchvision expect their md5 sum."""
        rows = np.zeros((len(writers), 8), dtype=np.int64)
        rows[:, 0], rows[:, 2] = np.arange(first, first + len(writers)) % 10, writers
        content = gzip.compress(idx(rows, 0x0C))
        self.path(split).write_bytes(content)
        pair, (url, _) = QMNIST.resources[split]
        right = [pair, (url, hashlib.md5(content).hexdigest())]
        self._patch.setattr(QMNIST, "resources", {**QMNIST.resources, split: right})

    def load(self, download: bool = False, **options: Any) -> UserDataModule:
        data = UserDataModule(
            "mnist_writers", root=str(self.root), expected_batch_size=2, download=download, options=options
        )
        data.setup()
        return data


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digits:
    return Digits(tmp_path, monkeypatch)


def test_real_writers(data_folder: Path) -> None:
    data = UserDataModule("mnist_writers", root=str(data_folder), expected_batch_size=50, download=False)
    train, test = data.users, data.test_users
    assert test is not None and not set(train.names) & set(test.names)
    assert (len(train), train.sizes.sum(), train.sizes.min(), train.sizes.max()) == (539, 60_000, 19, 131)
    assert (len(test), test.sizes.sum(), test.sizes.min(), test.sizes.max()) == (297, 10_000, 8, 130)
    images, labels = train.batch(0, [0, 1])
    assert images.shape == (2, 1, 28, 28) and labels.dtype == torch.int64
    assert (float(images.min()), float(images.max())) == (0, 1)


def test_writers_of_a_small_file(digits: Digits) -> None:
    data = digits.load()
    assert data.users.names == [7, 8, 9] and data.users.sizes.tolist() == [4, 4, 4]
    assert data.users.batch(0, [0, 3])[1].tolist() == [0, 7]
    assert data.test_users is not None and data.test_users.names == [1, 2]  # not those beyond MNIST's test digits
    assert data.model_options() == {"input_shape": (1, 28, 28), "num_classes": 10}


def test_scale(digits: Digits) -> None:
    unit, standard = (digits.load(scale=scale).users.batch(0, [0])[0] for scale in ("unit", "standard"))
    assert torch.allclose((unit - 0.1307) / 0.3081, standard, atol=1e-5)
    noise, _ = digits.load(scale="standard").noise_batch(2, torch.Generator())
    assert float(noise.min()) < -0.3
    with pytest.raises(ConfigurationError, match="data.options.scale must be unit or standard, not 'bytes'"):
        digits.load(scale="bytes")


def test_features_are_those_of_the_same_digits_by_example(digits: Digits) -> None:
    chosen: dict[str, Any] = {"features": "mirrored_scattering", "image_size": 32}
    users = digits.load(**chosen)
    examples = ImageDataModule("mnist", root=str(digits.root), expected_batch_size=2, download=False, **chosen)
    assert users.model_options() == {"input_shape": (81, 8, 4), "num_classes": 10} == examples.model_options()
    assert torch.equal(users.users.examples.pixels, examples.train_set.pixels)
    noise = [data.noise_batch(2, torch.Generator().manual_seed(0))[0] for data in (users, examples)]
    assert torch.equal(*noise) and noise[0].shape == (2, 81, 8, 4)
    with pytest.raises(ConfigurationError, match="takes pixels as they are: keep data.options.scale=unit"):
        digits.load(features="scattering", scale="standard")


BROKEN: dict[str, Callable[[Digits], object]] = {
    "qmnist-test-labels-idx2-int.gz is not in .*QMNIST/raw, and data.download is false. Copy it there": (
        lambda digits: digits.path("test").unlink()
    ),
    "qmnist-train-labels-idx2-int.gz is damaged .wrong md5 sum.: delete it": (
        lambda digits: digits.path("train").write_bytes(b"cut")
    ),
    "the train labels of MNIST and QMNIST in .* differ": lambda digits: digits.write("train", [7] * 12, first=1),
    "the test labels of MNIST and QMNIST in .* differ": lambda digits: digits.write("test", [1] * 5),
    "1 writers of QMNIST have training and test digits": lambda digits: digits.write("test", [8] * 6),
}


@pytest.mark.parametrize("message", BROKEN)
def test_bad_files_are_one_clear_line(digits: Digits, message: str) -> None:
    BROKEN[message](digits)
    with pytest.raises(DataError, match=message) as caught:
        digits.load()
    assert "\n" not in str(caught.value)


def test_a_download_that_fails_says_so(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise OSError("no network\nat all")

    digits.path("train").unlink()
    monkeypatch.setattr("torchvision.datasets.utils.download_url", fails)
    with pytest.raises(DataError, match=r"and downloading failed \(no network\). Copy it there"):
        digits.load(download=True)
