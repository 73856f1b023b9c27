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
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.data.views import AugmentedImages, ImageOfView
from dpbench.errors import ConfigurationError

VIEWS = 3


def data_of(**options: Any) -> ImageDataModule:
    settings = {"image_size": 8, "train_size": 40, "expected_batch_size": 12, "augmentations": VIEWS}
    return ImageDataModule("digits", **{**settings, **options})


@pytest.mark.parametrize("size", [2, 8])
def test_views_are_crops_of_the_padded_image_mirrored_or_not(size: int) -> None:
    images = data_of(image_size=size).train_set
    augmented = AugmentedImages(images, 1000)
    augmented.begin_lot(np.random.default_rng(0))
    pixels, labels = augmented.__getitems__([5, 2]).batch
    assert torch.equal(labels, images.labels[[5, 2]].repeat_interleave(1000))
    padded = np.pad(images.pixels[2, ..., 0].numpy(), 4, mode="symmetric")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size)).reshape(-1, size, size)
    crops = {window.tobytes() for window in (*windows, *windows[..., ::-1])}
    drawn = {view.contiguous().numpy().tobytes() for view in pixels[1000:, 0]}
    assert drawn <= crops and len(drawn) > 0.95 * len(crops)


def views_of(loader: PrivateDataLoader, step: int) -> dict[int, bytes]:
    """The views of each record that this process has of a lot."""
    loader.lots.position = step
    loader.lots.in_use = True
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


def test_a_generator_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["experiment=digits_gan", "data.augmentations=2", "logger=none", "trainer.max_steps=1"]
    assert main(["train", *words]) == 1
    assert "a generator would learn to draw: remove it" in capsys.readouterr().err


def test_workers_and_features_are_refused() -> None:
    augmented = AugmentedImages(data_of().train_set, 2)
    with pytest.raises(ConfigurationError, match="leave num_workers at 0"):
        PrivateDataLoader.poisson(augmented, 12, record_of_row=ImageOfView(2), num_workers=1)
    with pytest.raises(ConfigurationError, match="data.features=scattering are computed only once"):
        data_of(features="scattering")
