"""Random views of images: a part of each, turned to a full image, mirrored or not, in other colors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_AREA = 0.2  # of the image that a view shows
_GRAY = 0.2  # of all views
# From red, green and blue to brightness and two differences of colors, and back.
_TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def random_views(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """One view of each image: crop, mirroring, brightness, contrast, saturation, hue, and at times gray.

    Args:
        images: (N, 3, H, W) in [0, 1].
        side: Side of a view, in pixels.
        generator: Gives all random numbers, on the device of the images.

    Returns:
        (N, 3, side, side) in [0, 1].
    """
    return _recolored(_cropped(images, side, generator), generator)


def _cropped(images: Tensor, side: int, generator: torch.Generator) -> Tensor:
    count = len(images)
    area = _between(generator, (count,), _LEAST_AREA, 1.0)
    ratio = torch.exp(_between(generator, (count,), math.log(3 / 4), math.log(4 / 3)))
    width = (area * ratio).sqrt().clamp(max=1.0)
    height = (area / ratio).sqrt().clamp(max=1.0)
    mirrored = 1 - 2 * torch.randint(2, (count,), generator=generator, device=images.device)
    place = _between(generator, (count, 2), -1.0, 1.0)
    affine = torch.zeros(count, 2, 3, device=images.device)
    affine[:, 0, 0] = width * mirrored
    affine[:, 1, 1] = height
    affine[:, 0, 2] = place[:, 0] * (1 - width)
    affine[:, 1, 2] = place[:, 1] * (1 - height)
    grid = F.affine_grid(affine, [count, 3, side, side], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def _recolored(images: Tensor, generator: torch.Generator) -> Tensor:
    """One linear map of the colors of each image around its mean."""
    count = len(images)
    to_yiq = torch.tensor(_TO_YIQ, device=images.device)
    contrast = _between(generator, (count,), 0.6, 1.4)
    saturation = _between(generator, (count,), 0.4, 1.6)
    gray = torch.rand(count, generator=generator, device=images.device) < _GRAY
    saturation = torch.where(gray, 0.0, saturation)
    hue = _between(generator, (count,), -0.6, 0.6)
    turned = torch.zeros(count, 3, 3, device=images.device)
    turned[:, 0, 0] = contrast
    turned[:, 1, 1] = turned[:, 2, 2] = contrast * saturation * hue.cos()
    turned[:, 1, 2] = -contrast * saturation * hue.sin()
    turned[:, 2, 1] = contrast * saturation * hue.sin()
    colors = torch.linalg.inv(to_yiq) @ turned @ to_yiq
    means = images.mean((2, 3), keepdim=True)
    grays = torch.einsum("c,nchw->nhw", to_yiq[0], means)[:, None]
    means = torch.where(gray[:, None, None, None], grays, means)
    shift = _between(generator, (count, 1, 1, 1), -0.2, 0.2)
    moved = torch.einsum("noc,nchw->nohw", colors, images - images.mean((2, 3), keepdim=True))
    return (means + shift + moved).clamp(0, 1)


def _between(
    generator: torch.Generator,
    shape: tuple[int, ...],
    low: float,
    high: float,
) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)
