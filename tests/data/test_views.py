"""Augmented views: what they are, and whose random numbers they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dpbench.cli import main
from dpbench.data.images import ImageDataModule
from dpbench.data.lots import PrivateBatchSampler, PrivateDataLoader
from dpbench.data.views import AugmentedImages, ImageOfView
from dpbench.errors import ConfigurationError

VIEWS = 3


def data_of(**options: Any) -> ImageDataModule:
    settings = {"image_size": 8, "train_size": 40, "expected_batch_size": 12, "augmentations": VIEWS}
    return ImageDataModule("digits", **{**settings, **options})


def test_views_are_crops_of_the_padded_image_mirrored_or_not() -> None:
    images = data_of().train_set
    augmented = AugmentedImages(images, 400)
    augmented.begin_lot(np.random.default_rng(0))
    pixels, labels = augmented.__getitems__([5, 2]).batch
    assert torch.equal(labels, images.labels[[5, 2]].repeat_interleave(400))
    padded = np.pad(images.pixels[2].numpy(), ((4, 4), (4, 4), (0, 0)), mode="symmetric")
    crops = {}
    for top in range(9):
        for left in range(9):
            crop = padded[top : top + 8, left : left + 8]
            crops[crop.transpose(2, 0, 1).tobytes()] = (top, left, False)
            crops[crop[:, ::-1].transpose(2, 0, 1).tobytes()] = (top, left, True)
    drawn = {crops[view.contiguous().numpy().tobytes()] for view in pixels[400:]}
    assert {top for top, _, _ in drawn} == {left for _, left, _ in drawn} == set(range(9))
    assert {mirrored for _, _, mirrored in drawn} == {False, True}
    assert len(drawn) > 120  # of 162


def test_an_image_smaller_than_the_padding() -> None:
    augmented = AugmentedImages(data_of(image_size=2).train_set, 50)
    augmented.begin_lot(np.random.default_rng(0))
    pixels, _ = augmented.__getitems__([0]).batch
    padded = np.pad(augmented.examples.pixels[0].numpy(), ((4, 4), (4, 4), (0, 0)), mode="symmetric")
    windows = np.lib.stride_tricks.sliding_window_view(padded[..., 0], (2, 2)).reshape(-1, 2, 2)
    allowed = {window.tobytes() for window in (*windows, *windows[..., ::-1])}
    assert {view.contiguous().numpy().tobytes() for view in pixels[:, 0]} <= allowed


def views_of(loader: PrivateDataLoader, step: int) -> dict[int, bytes]:
    """The views of each record that this process has of a lot."""
    loader.lots.position = step
    images, _ = next(iter(loader))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    positions, _ = loader.lots.share(step, rank, world)
    assert len(images) == VIEWS * len(positions)
    return {position: images[i * VIEWS : i * VIEWS + VIEWS].numpy().tobytes() for i, position in enumerate(positions)}


def test_views_depend_on_the_lot_and_the_record_alone() -> None:
    def shares(loader: PrivateDataLoader, step: int, world: int) -> list[dict[int, bytes]]:
        shared = []
        for rank in range(world):
            with (
                mock.patch("torch.distributed.is_initialized", return_value=True),
                mock.patch("torch.distributed.get_rank", return_value=rank),
                mock.patch("torch.distributed.get_world_size", return_value=world),
            ):
                shared.append(views_of(loader, step))
        return shared

    loader = data_of().train_dataloader()
    (whole,) = shares(loader, 3, 1)
    one, two = shares(data_of().train_dataloader(), 3, 2)
    assert one and two and whole == {**one, **two}
    # Half of the records leave the lot: the views of the others stay.
    members = np.arange(40) % 2 == 0
    fewer = PrivateDataLoader(
        loader.dataset, PrivateBatchSampler(loader.lots.sampling, 0, members=members), None, ImageOfView(VIEWS)
    )
    (of_members,) = shares(fewer, 3, 1)
    assert of_members == {position: views for position, views in whole.items() if members[position]}
    (next_lot,) = shares(loader, 4, 1)
    both = set(whole) & set(next_lot)
    assert both and all(whole[position] != next_lot[position] for position in both)
    (of_another_seed,) = shares(data_of(seed=1).train_dataloader(), 3, 1)
    assert all(whole[position] != of_another_seed[position] for position in set(whole) & set(of_another_seed))


def test_evaluation_sees_images_as_they_are() -> None:
    augmented, plain = data_of(val_size=10), data_of(val_size=10, augmentations=None)
    for loader in ("val_dataloader", "test_dataloader", "candidate_dataloader"):
        (images, _), (others, _) = (next(iter(getattr(data, loader)())) for data in (augmented, plain))
        assert torch.equal(images, others)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "data=digits data.features=scattering data.augmentations=2",
            "data.features=scattering are made of each image",
        ),
        ("experiment=digits_gan data.augmentations=2", "a generator would learn to draw such ones: remove it"),
        ("data=table data.augmentations=2", "there is no key data.augmentations"),
        ("data=digits data.augmentations=0", "data.augmentations"),
        ("data=digits data.augmentations=2 strategy.microbatch_size=2", "does not go with record_of_row"),
    ],
)
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words.split(), "logger=none", "strategy.delta=1e-4", "trainer.max_steps=1"]) == 1
    assert message in capsys.readouterr().err


def test_workers_are_refused() -> None:
    augmented = AugmentedImages(data_of().train_set, 2)
    with pytest.raises(ConfigurationError, match="leave num_workers at 0"):
        PrivateDataLoader.poisson(augmented, 12, record_of_row=ImageOfView(2), num_workers=1)
