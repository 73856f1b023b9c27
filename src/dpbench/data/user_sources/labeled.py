"""What data sets of labeled images share: what they say to a model, and noise that looks like them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpbench.data.images import InMemoryImages, normalize
from dpbench.data.sources import Images, Source


def image_options(
    images: InMemoryImages,
    spec: Source,
    scale: str = "standard",
) -> dict[str, Any]:
    """Fields of `UserData` that labeled images determine: `model_options` and `noise_batch`."""
    height, width, channels = images.pixels.shape[1:]
    return {
        "model_options": {"input_shape": (channels, height, width), "num_classes": spec.num_classes},
        "noise_batch": partial(_noise, shape=(height, width, channels), spec=spec, scale=scale),
    }


def _noise(
    size: int,
    generator: torch.Generator,
    shape: tuple[int, ...],
    spec: Source,
    scale: str,
) -> tuple[Tensor, Tensor]:
    """Uniform noise, scaled as the images are, with random labels: what needs no budget to look at."""
    pixels = torch.rand(size, *shape, generator=generator)
    labels = torch.randint(spec.num_classes, (size,), generator=generator)
    noise = normalize(Images(pixels, labels), spec, None, scale)
    return noise.pixels.permute(0, 3, 1, 2), labels
