"""Augmentation multiplicity: several augmented views of each image, with gradients averaged before clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from dpbench.data.records import Collated

_PAD = 4  # pixels on each side, of which a crop keeps the image's own size
_OFFSETS = 2 * _PAD + 1
_CHOICES = 2 * _OFFSETS**2  # mirrored or not, and where the crop lies


class AugmentedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images of which a batch holds several random views each: a crop of the padded image, mirrored or not.

    Each image is padded by 4 pixels, which repeat those at the edge in reverse order; a crop of the image's own size
    lies anywhere, and half of the crops are mirrored left to right (De et al. 2022; as in the authors' `augmult.py`).

    The views of an image are a function of the batch's key and of the image's position. No other record moves them, a
    resumed training makes the same ones, and so does every process of several.

    Args:
        images: The images, with `pixels` (N, H, W, C) and `labels` (N,).
        views: Number of views of each image in a batch, K.
    """

    def __init__(self, images: Any, views: int) -> None:
        self.examples = images
        self.views = views
        self._rng: np.random.Generator | None = None

    def rows_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of `examples` that some records are made of: each of its own."""
        return records

    def begin_lot(self, rng: np.random.Generator) -> None:
        """Take the random numbers of the coming batch; `PrivateDataLoader` calls it before it reads one.

        Args:
            rng: A function of the batch's key, the same in all processes.
        """
        self._rng = rng

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Image (C, H, W), as it is stored, and label ()."""
        image: tuple[Tensor, Tensor] = self.examples[position]
        return image

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        """Views (K·R, C, H, W), those of an image one after the other, and labels (K·R,)."""
        assert self._rng is not None, "PrivateDataLoader sets the step"
        index = np.asarray(positions, dtype=np.int64)
        # One number for each view of all images, so that an image's are the same whatever the lot holds beside it.
        choices = self._rng.integers(_CHOICES, size=(len(self), self.views), dtype=np.uint8)[index].ravel()
        mirrored, offsets = np.divmod(choices, _OFFSETS**2)
        top, left = np.divmod(offsets, _OFFSETS)
        height, width = self.examples.pixels.shape[1:3]
        rows = _places(top, height)
        columns = _places(left, width)
        columns = torch.where(torch.from_numpy(mirrored == 1)[:, None], columns.flip(1), columns)
        image_of = torch.from_numpy(index.repeat(self.views))
        pixels = self.examples.pixels[image_of[:, None, None], rows[:, :, None], columns[:, None, :]]
        return Collated((pixels.permute(0, 3, 1, 2), self.examples.labels[image_of]))


def _places(first: NDArray[np.integer[Any]], size: int) -> Tensor:
    """Pixels of an image that each crop shows along one dimension, shape (rows, size).

    Args:
        first: Place in the padded image at which a crop begins.
        size: Size of the image.
    """
    places = first[:, None].astype(np.int64) + np.arange(size) - _PAD
    places %= 2 * size  # the image and its mirror image, over and over
    return torch.from_numpy(np.minimum(places, 2 * size - 1 - places))


@dataclass(frozen=True)
class ImageOfView:
    """Maps each row of a batch to the image that it shows, where every image has the same number of views.

    Args:
        views: Number of views of each image, K.
    """

    views: int

    def __call__(self, batch: Sequence[Tensor]) -> Tensor:
        """Position of the image in the batch, shape (rows,).

        Args:
            batch: Images and labels.
        """
        return torch.arange(len(batch[1])) // self.views
