"""Pairs of a generator and a discriminator, unconditional or with a class for each image."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from dpbench.models.shapes import Size, require

_SLOPE = 0.2
_APPENDIX_EPS = 0.8  # of BatchNorm in the paper's appendix


def _with_class(noise: Tensor, labels: Tensor | None, classes: int) -> Tensor:
    """Rows (N, D) of noise with a one-hot class behind them; with a larger number the generator overlooks the noise."""
    if not classes:
        return noise
    assert labels is not None
    return torch.cat([noise, F.one_hot(labels, classes).to(noise.dtype)], 1)


def _verdict(rows: Tensor, labels: Tensor | None) -> Tensor:
    """Logits (N,): a number for all classes and one for the class itself, from rows (N, 1 + classes).

    So ends the projection discriminator of Miyato and Koyama (2018), which cannot overlook the class.
    """
    return rows[:, 0] if labels is None else rows[:, 0] + rows.gather(1, labels[:, None] + 1)[:, 0]


class Generator(nn.Module):
    """Noise and a class → image.

    Args:
        layers: (N, noise_size + classes) → (N, C·H·W), or images.
        image_shape: (channels, height, width).
        classes: Number of classes that condition it; 0 for none.
        noise_size: Numbers of noise.

    Shape:
        Noise (N, noise_size) and labels (N,) or None → images (N, *image_shape) in [−1, 1].
    """

    def __init__(
        self,
        layers: nn.Sequential,
        image_shape: tuple[int, int, int],
        classes: int,
        noise_size: int,
    ) -> None:
        super().__init__()
        self.image_shape = image_shape
        self.classes = classes
        self.noise_size = noise_size
        self.layers = layers

    def forward(self, noise: Tensor, labels: Tensor | None = None) -> Tensor:
        """Images (N, *image_shape) in [−1, 1], from noise (N, noise_size) and labels (N,)."""
        images: Tensor = self.layers(_with_class(noise, labels, self.classes))
        return images.view(len(noise), *self.image_shape)


class Discriminator(nn.Module):
    """Image and its class → logit; the sigmoid is part of the loss.

    Args:
        layers: Images, flattened where the first layer is linear → (N, 1 + classes).
        classes: Number of classes that condition it; 0 for none.

    Shape:
        Images (N, *image_shape) and labels (N,) or None → logits (N,), positive for real.
    """

    def __init__(self, layers: nn.Sequential, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = layers
        self._is_flat = isinstance(layers[0], nn.Linear)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (N,) of images being real, of the classes `labels` where there are any."""
        return _verdict(self.layers(images.flatten(1) if self._is_flat else images), labels)


class MLPGAN(nn.Module):
    """The fully connected pair of pyvacy_2019, appendix B.

    Generator: noise → 128 → 256 → 512 → 1024 → image, LeakyReLU 0.2, BatchNorm from 256 on, tanh. Discriminator: image
    → 512 → 256 → logit, LeakyReLU 0.2.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: Number of classes.
        conditional: True to condition both networks on the class.
        noise_size: Numbers of noise.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        conditional: bool = False,
        noise_size: Size = 100,
    ) -> None:
        super().__init__()
        classes = num_classes if conditional else 0
        pixels = math.prod(input_shape)
        layers: list[nn.Module] = [nn.Linear(noise_size + classes, 128), nn.LeakyReLU(_SLOPE)]
        for n_in, n_out in pairwise((128, 256, 512, 1024)):
            layers += [nn.Linear(n_in, n_out), nn.BatchNorm1d(n_out, _APPENDIX_EPS), nn.LeakyReLU(_SLOPE)]
        layers += [nn.Linear(1024, pixels), nn.Tanh()]
        self.generator = Generator(nn.Sequential(*layers), input_shape, classes, noise_size)
        layers = []
        for n_in, n_out in pairwise((pixels, 512, 256)):
            layers += [nn.Linear(n_in, n_out), nn.LeakyReLU(_SLOPE)]
        self.discriminator = Discriminator(nn.Sequential(*layers, nn.Linear(256, 1 + classes)), classes)


class ConvGAN(nn.Module):
    """A small convolutional pair (Radford et al. 2016); the discriminator has no normalization that mixes records.

    Generator: noise → (2·width)×H/4×W/4 → width×H/2×W/2 → image by transposed convolutions, BatchNorm, ReLU, tanh.
    Discriminator: image → width×H/2×W/2 → (2·width)×H/4×W/4 → logit, GroupNorm, LeakyReLU 0.2.

    Args:
        input_shape: (channels, height, width) of an image; sides are multiples of four.
        num_classes: Number of classes.
        conditional: True to condition both networks on the class.
        noise_size: Numbers of noise.
        width: Channels next to the image; a multiple of eight.
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        conditional: bool = True,
        noise_size: Size = 100,
        width: Annotated[int, Field(ge=8, multiple_of=8), "a width that 8 divides"] = 16,
    ) -> None:
        super().__init__()
        channels, height, side = input_shape
        require(
            height % 4 == 0 and side % 4 == 0 and min(height, side) >= 4,
            "conv_gan",
            input_shape,
            "sides that 4 divides",
        )
        classes = num_classes if conditional else 0
        smallest = (2 * width, height // 4, side // 4)
        generating = nn.Sequential(
            nn.Linear(noise_size + classes, math.prod(smallest), bias=False),
            nn.Unflatten(1, smallest),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, channels, 4, 2, 1),
            nn.Tanh(),
        )
        judging = nn.Sequential(
            nn.Conv2d(channels, width, 4, 2, 1),
            nn.LeakyReLU(_SLOPE),
            nn.Conv2d(width, 2 * width, 4, 2, 1),
            nn.GroupNorm(width // 8, 2 * width),
            nn.LeakyReLU(_SLOPE),
            nn.Flatten(),
            nn.Linear(math.prod(smallest), 1 + classes),
        )
        self.generator = Generator(generating, input_shape, classes, noise_size)
        self.discriminator = Discriminator(judging, classes)
