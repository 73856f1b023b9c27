"""CIFAR by user: crops, standardization, allocation; CIFAR-100 from a small archive of the same layout."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR100

from dpbench.data import UserDataModule
from dpbench.data.sources import Images
from dpbench.data.user_sources.dealt import CroppedImages
from dpbench.errors import ConfigurationError, DataError

_COARSE = np.arange(100) * 7 % 20  # five fine classes each, as in the archive, but not its own


def images(size: int, side: int = 32) -> Images:
    pixels = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Images(pixels, torch.arange(size))


def write_cifar100(root: Path, monkeypatch: pytest.MonkeyPatch, train: int = 2000, test: int = 100) -> Path:
    """An archive of CIFAR-100's layout whose md5 sums torchvision expects."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    sums = {}
    for name, size in (("train", train), ("test", test)):
        fine = rng.permutation(np.arange(size) % 100)
        entry = {
            "data": rng.integers(0, 256, (size, 3072), dtype=np.uint8),
            "fine_labels": fine.tolist(),
            "coarse_labels": _COARSE[fine].tolist(),
        }
        sums[name] = write(folder / name, entry)
    names = {"fine_label_names": [f"fine{i}" for i in range(100)], "coarse_label_names": [f"c{i}" for i in range(20)]}
    sums["meta"] = write(folder / "meta", names)
    expect(monkeypatch, sums)
    return folder


def write(path: Path, entry: Any) -> str:
    path.write_bytes(pickle.dumps(entry, protocol=2))
    return hashlib.md5(path.read_bytes()).hexdigest()


def expect(monkeypatch: pytest.MonkeyPatch, sums: dict[str, str]) -> None:
    if "train" in sums:
        monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
    if "test" in sums:
        monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
    if "meta" in sums:
        monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})


def load(root: Path, **options: Any) -> UserDataModule:
    data = UserDataModule("cifar100_users", root=str(root), expected_batch_size=5, download=False, options=options)
    data.setup()
    return data


def test_middle_crop_standardized_by_hand() -> None:
    whole = images(3)
    made, labels = CroppedImages(whole, 24, augment=False).__getitems__([2, 0]).batch
    assert made.shape == (2, 3, 24, 24) and labels.tolist() == [2, 0]
    assert made.is_contiguous(memory_format=torch.channels_last)
    crop = whole.pixels[2, 4:28, 4:28].double().permute(2, 0, 1)
    assert torch.allclose(made[0].double(), (crop - crop.mean()) / crop.std(correction=0), atol=1e-5)


def test_an_image_of_one_color_is_zero() -> None:
    flat = Images(torch.full((1, 32, 32, 3), 9, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    assert CroppedImages(flat, 24, augment=False)[0][0].abs().max() == 0


def test_crops_lie_anywhere_and_half_are_mirrored() -> None:
    """Each pixel says where it was: 8·row in one channel, 8·column in another."""
    place = (torch.arange(32) * 8).to(torch.uint8)
    pixels = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
    pixels[0, :, :, 0], pixels[0, :, :, 1] = place[:, None], place[None, :]
    seen = CroppedImages(Images(pixels, torch.zeros(1, dtype=torch.long)), 24, augment=True)
    torch.manual_seed(3)
    many = seen.__getitems__([0] * 2000).batch[0]
    mirrored = many[:, 1, 0, 0] > many[:, 1, 0, -1]
    assert 0.45 < float(mirrored.float().mean()) < 0.55
    assert not (many[:, 0, 0, 0] > many[:, 0, -1, 0]).any()  # never upside down
    # Of an image of places, the blue zeros say where the mean lay, and so the corner: 9 × 9 corners, all seen.
    scale = (many[:, 0, -1, 0] - many[:, 0, 0, 0]) / (23 * 8)
    top = ((many[:, 0, 0, 0] - many[:, 2, 0, 0]) / scale / 8).round().long()
    least = torch.minimum(many[:, 1, 0, 0], many[:, 1, 0, -1])
    left = ((least - many[:, 2, 0, 0]) / scale / 8).round().long()
    assert sorted(set(zip(top.tolist(), left.tolist(), strict=True))) == [(i, j) for i in range(9) for j in range(9)]
    assert abs(float(torch.bincount(top, minlength=9).float().std())) < 45  # 222 each, binomial deviation 14


def test_augmentation_follows_the_global_generator_and_plain_has_none() -> None:
    made = CroppedImages(images(8), 24, augment=True)
    batches = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        batches.append(made.__getitems__(range(8)).batch[0])
    assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])
    assert torch.equal(made.plain[3][0], CroppedImages(images(8), 24, augment=False)[3][0])
    with pytest.raises(IndexError):
        made[8]


def test_no_example_is_an_empty_batch() -> None:
    assert CroppedImages(images(8), 24, augment=True).__getitems__([]).batch[0].shape == (0, 3, 24, 24)


def test_cifar100_is_dealt_by_two_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_cifar100(tmp_path, monkeypatch)
    data = load(tmp_path, users=20)
    assert len(data.users) == 20 and data.users.sizes.tolist() == [100] * 20
    assert data.model_options() == {"input_shape": (3, 24, 24), "num_classes": 100}
    entry = pickle.loads((folder / "train").read_bytes())
    labels = data.users.examples.labels.numpy()  # type: ignore[attr-defined]
    assert sorted(labels) == sorted(entry["fine_labels"])
    largest = [np.bincount(_COARSE[labels[data.users.rows(user)]], minlength=20).max() for user in range(5)]
    assert np.mean(largest) > 35  # of 100: about 50; 22 without the coarse classes
    again = load(tmp_path, users=20)
    assert all((data.users.rows(user) == again.users.rows(user)).all() for user in range(20))
    assert load(tmp_path, users=30).users.sizes.tolist() == [66] * 30
    assert len(data.test_set) == 100  # type: ignore[arg-type]
    images, _ = data.users.batch(0, range(20))
    assert images.shape == (20, 3, 24, 24)


def test_validation_is_not_augmented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar100(tmp_path, monkeypatch)
    data = UserDataModule(
        "cifar100_users", root=str(tmp_path), expected_batch_size=5, download=False, val_users=5, options={"users": 20}
    )
    one, two = (next(iter(data.val_dataloader()))[0] for _ in range(2))
    assert len(one) in (300, 400, 500, 600, 700) and torch.equal(one, two)
    train = [data.users.batch(0, range(20))[0] for _ in range(2)]
    assert not torch.equal(*train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": 3000}, "data.options.users must be at most the number of examples, 2000, not 3000"),
        ({"crop": 33}, "data.options.crop must be a whole number of pixels from 1 to 32, not 33"),
        ({"augment": "often"}, "data.options.augment must be true or false, not 'often'"),
        ({"beta": -1.0}, "data.options.beta must be a number above 0"),
    ],
)
def test_options_of_cifar100(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    write_cifar100(tmp_path, monkeypatch)
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, **options)


def test_damaged_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="CIFAR100 is not in .*cifar-100-python, and data.download is false"):
        load(tmp_path)
    folder = write_cifar100(tmp_path, monkeypatch)
    (folder / "train").write_bytes((folder / "train").read_bytes()[:-100])
    with pytest.raises(DataError, match="CIFAR100 in .* is incomplete or damaged"):
        load(tmp_path)
