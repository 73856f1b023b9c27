"""Data sets: shapes, scaling, splits, and clear errors for what is absent or damaged."""

from __future__ import annotations

from hashlib import md5, sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat
from torchvision.datasets import SVHN

from dpbench.data import noise, sources
from dpbench.data.images import ImageDataModule, normalize
from dpbench.data.sources import SOURCES, Images, data_root
from dpbench.errors import ConfigurationError, DataError


def test_digits_need_no_files(tmp_path: Path) -> None:
    data = ImageDataModule("digits", root=str(tmp_path), expected_batch_size=64)
    assert data.input_shape == (1, 28, 28)
    assert len(data.train_set) == 1437
    assert torch.bincount(torch.cat([y for _, y in data.test_dataloader()])).sum() == 360
    assert abs(float(data.train_set.pixels.mean())) < 0.1
    assert not list(tmp_path.iterdir())


def test_batches_are_channels_last_and_match_single_items() -> None:
    train = ImageDataModule("random_noise", train_size=40).train_set
    lot = train.__getitems__([3, 1, 3])
    images, labels = lot.batch
    assert len(lot) == 3 and torch.equal(lot[-1][0], images[2])
    assert images.shape == (3, 3, 32, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images[1], train[1][0])
    assert torch.equal(labels, torch.stack([train[i][1] for i in (3, 1, 3)]))


def test_random_noise_by_default_is_what_it_always_was() -> None:
    images = SOURCES["random_noise"].load(Path(), "test", False)
    digests = [sha256(part.numpy().tobytes()).hexdigest()[:16] for part in (images.pixels, images.labels)]
    assert digests == ["4f0993408d55744d", "b16557d38df10870"]


def test_random_noise_of_any_size_and_shape() -> None:
    few = ImageDataModule("random_noise", expected_batch_size=8, train_size=40, test_size=7, like="mnist")
    assert few.input_shape == (1, 28, 28) and len(few.train_set) == 40 == few.sampling.population
    assert len(few.test_set) == 7
    assert abs(float(few.train_set.pixels.std()) - 1) < 0.02
    more = ImageDataModule("random_noise", train_size=400, test_size=70, like="mnist")
    assert torch.equal(more.train_set.pixels[:40], few.train_set.pixels)
    assert torch.equal(more.train_set.labels[:40], few.train_set.labels)
    assert torch.equal(more.test_set.labels[:7], few.test_set.labels)
    assert not torch.equal(more.test_set.pixels[:40], few.train_set.pixels)
    small = ImageDataModule("random_noise", expected_batch_size=8, train_size=40, like="mnist", image_size=8)
    assert abs(float(small.train_set.pixels.std()) - 1) < 0.05  # not blurred


def test_images_standardized_alone() -> None:
    alone = ImageDataModule("digits", scale="per_image", expected_batch_size=64)
    pixels = alone.train_set.pixels.double()
    assert float(pixels.flatten(1).mean(1).abs().max()) < 1e-6
    assert float((pixels.flatten(1).std(1, correction=0) - 1).abs().max()) < 1e-5
    row = ImageDataModule("digits", scale="unit", expected_batch_size=64).train_set.pixels[0].double()
    assert torch.allclose(pixels[0], (row - row.mean()) / row.std(correction=0), atol=1e-5)
    noise, _ = alone.noise_batch(5, torch.Generator().manual_seed(0))
    assert torch.allclose(noise.flatten(1).std(1, correction=0), torch.ones(5), atol=1e-5)


def test_an_image_of_one_color_is_standardized_to_zeros() -> None:
    pixels = torch.full((2, 8, 8, 3), 128, dtype=torch.uint8)
    pixels[1, 0, 0, 0] = 129
    made = normalize(Images(pixels, torch.zeros(2)), SOURCES["cifar10"], None, "per_image").pixels
    assert float(made[0].abs().max()) < 1e-5
    # below 1/sqrt(192) of deviation an image is not blown up to noise
    assert 0 < float(made[1].std()) < 0.1


def test_labels_of_noise_do_not_repeat_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(noise._BYTES_BEFORE_LABELS, "train", 3 * 28 * 28)  # three images; others from another stream
    few, more = (sources.noise_like(SOURCES["mnist"], size, size).load(Path(), "train", False) for size in (3, 20))
    assert torch.equal(more.pixels[:3], few.pixels) and torch.equal(more.labels[:3], few.labels)
    assert len(torch.unique(more.pixels.flatten(1), dim=0)) == 20


def test_the_first_records_of_a_data_set() -> None:
    whole, part = ImageDataModule("digits"), ImageDataModule("digits", train_size=100, test_size=10, val_size=20)
    assert part.val_set is not None and len(part.val_set) > 0 and len(part.test_set) == 10
    assert len(part.train_set) + len(part.val_set) == 100
    kept = torch.cat([part.train_set.pixels, part.val_set.pixels])
    assert torch.equal(kept.flatten(1).sum(1).sort()[0], whole.train_set.pixels[:100].flatten(1).sum(1).sort()[0])
    with pytest.raises(ConfigurationError, match="data.train_size=1438 is more than the 1437 train records of digits"):
        ImageDataModule("digits", train_size=1438).setup()
    with pytest.raises(ConfigurationError, match="data.like=mnist is for data=random_noise, .* not for digits"):
        ImageDataModule("digits", like="mnist")


def test_validation_split_is_disjoint_and_fixed() -> None:
    whole = ImageDataModule("digits", image_size=8).train_set
    data, other = (ImageDataModule("digits", image_size=8, val_size=300, seed=seed) for seed in (5, 6))
    data.setup()
    held = next(iter(data.val_dataloader()))[0]
    assert abs(len(held) - 300) < 60  # the expected number
    assert len(data.train_set) == 1437 - len(held) == data.sampling.population
    assert data.monitored == "val"
    assert torch.equal(data.train_set.pixels, other.train_set.pixels)
    both = torch.cat([held.permute(0, 2, 3, 1), data.train_set.pixels]).flatten(1)
    assert len(torch.unique(both, dim=0)) == len(torch.unique(whole.pixels.flatten(1), dim=0))


@pytest.mark.parametrize(
    ("name", "shape", "sizes"),
    [
        ("mnist", (1, 28, 28), (60_000, 10_000)),
        pytest.param("cifar10", (3, 32, 32), (50_000, 10_000), marks=pytest.mark.slow),
    ],
)
def test_real_data(name: str, shape: tuple[int, int, int], sizes: tuple[int, int], data_folder: Path) -> None:
    data = ImageDataModule(name, root=str(data_folder), download=False)
    assert data.input_shape == shape
    assert len(data.train_set) == sizes[0]
    assert sum(len(y) for _, y in data.test_dataloader()) == sizes[1]
    mean, std = data.train_set.pixels.mean((0, 1, 2)), data.train_set.pixels.std((0, 1, 2))
    assert mean.abs().max() < 2e-3
    assert (std - 1).abs().max() < 2e-3


def _svhn(root: Path, monkeypatch: pytest.MonkeyPatch, train: int = 30, test: int = 10) -> Path:
    """Files as SVHN's, whose md5 sums are expected: pixels (H, W, C, N), classes 1 to 10, of which 10 is digit 0."""
    folder = root / "SVHN"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = {}
    for split, size in (("train", train), ("test", test)):
        path = folder / f"{split}_32x32.mat"
        pixels = rng.integers(0, 256, (32, 32, 3, size), dtype=np.uint8)
        labels = (np.arange(size, dtype=np.uint8) % 10 + 1)[:, None]
        savemat(path, {"X": pixels, "y": labels})
        files[split] = [f"https://absent/{path.name}", path.name, md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(SVHN, "split_list", {**SVHN.split_list, **files})
    return folder


def test_svhn_has_its_pixels_and_ten_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _svhn(tmp_path, monkeypatch)
    data = ImageDataModule("svhn", root=str(tmp_path), expected_batch_size=8, download=False, scale="unit")
    assert data.model_options() == {"input_shape": (3, 32, 32), "num_classes": 10}
    assert data.sampling.population == 30 and len(data.test_set) == 10
    raw = loadmat(folder / "train_32x32.mat")
    assert data.train_set.labels.tolist() == (raw["y"].ravel() % 10).tolist()
    pixels = torch.from_numpy(raw["X"]).permute(3, 0, 1, 2) / 255
    assert torch.equal(data.train_set.pixels, pixels) and data.train_set.pixels.is_contiguous()


def test_damaged_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _svhn(tmp_path, monkeypatch)
    test_file = folder / "test_32x32.mat"
    content = test_file.read_bytes()
    for damage in (lambda: test_file.write_bytes(content[:-9]), test_file.unlink):
        damage()
        with pytest.raises(DataError, match="SVHN in .* is incomplete or damaged .*delete that"):
            ImageDataModule("svhn", root=str(tmp_path), expected_batch_size=8).setup()
    folder = _svhn(tmp_path / "one", monkeypatch, train=1, test=1)
    assert ImageDataModule("svhn", root=str(folder.parent), expected_batch_size=1).train_set.labels.tolist() == [1]


def test_absent_and_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.svhn.download_url", offline)
    for download, reason in ((True, "downloading failed"), (False, "data.download is false")):
        with pytest.raises(DataError, match=reason) as caught:
            ImageDataModule("svhn", root=str(tmp_path), download=download).setup()
        assert str(tmp_path) in str(caught.value)
        assert "data.root or $DPBENCH_DATA" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_where_data_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPBENCH_DATA", str(tmp_path / "env"))
    assert data_root("given") == Path("given")
    assert data_root(None) == tmp_path / "env"
    monkeypatch.setenv("DPBENCH_DATA", "  ")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root(None) == tmp_path / "cache" / "dpbench"


def test_unknown_data_set() -> None:
    with pytest.raises(ConfigurationError, match="unknown data set 'imagenet'; known are digits"):
        ImageDataModule("imagenet")


def _mnist(root: Path, labels: list[int], images: int) -> None:
    """Files as MNIST's, of a few black images."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        head = bytes([0, 0, 8, 3, *images.to_bytes(4, "big"), 0, 0, 0, 28, 0, 0, 0, 28])
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + bytes(28 * 28 * images))
        head = bytes([0, 0, 8, 1, *len(labels).to_bytes(4, "big")])
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(head + bytes(labels))


@pytest.mark.parametrize(
    ("labels", "images", "message"),
    [
        ([0, 12, 3], 3, "train data: labels run from 0 to 12, not from 0 to 9"),
        ([0, 1], 3, "train data: 3 images have 2 labels"),
        ([], 0, "is incomplete or damaged"),
    ],
)
def test_labels_that_cannot_be(labels: list[int], images: int, message: str, tmp_path: Path) -> None:
    _mnist(tmp_path, labels, images)
    with pytest.raises(DataError, match=message) as caught:
        ImageDataModule("mnist", root=str(tmp_path), download=False).setup()
    assert str(tmp_path / "MNIST" / "raw") in str(caught.value)
