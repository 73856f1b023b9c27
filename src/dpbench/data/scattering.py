"""Scattering features: fixed wavelets, moduli and averages, known without any data (Bruna and Mallat 2013).

Each image is treated by itself, and all constants are fixed here or computed of noise: no privacy is spent.
`color_scattering` and `mirrored_scattering` were designed by looking at CIFAR-10's training data (what that cost: see
results/recipes_cifar10_tuning): the ε of a model on CIFAR-10 itself does not cover this choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.errors import ConfigurationError

ORIENTATIONS = 8
GROUPS = 27
_BLOCK = 4
PER_CHANNEL = 81
"""Pixels of a side for one output, and features of a channel."""
_ORDERS = [1, ORIENTATIONS, ORIENTATIONS, ORIENTATIONS**2]
"""Features of a channel: averages of pixels, of fine and coarse moduli, and of coarse moduli of fine ones."""
_CENTER = (_BLOCK - 1) / 2  # of a block
_SIGMA, _FREQUENCY = 0.8, 0.75 * math.pi  # of the finest wavelet
_PIECE, _SMALLEST = 100, 12  # images at once, and pixels of a side
_COLORS = [[1 / 3, 1 / 3, 1 / 3], [1 / 2, -1 / 2, 0.0], [1 / 4, 1 / 4, -1 / 2]]
"""Brightness, red against green, yellow against blue."""
_MIDDLE = (0.5, 0.0, 0.0)
_UNIT = (0.25, 0.05, 0.05)
"""Of their pixels: round numbers, fixed for all data, like the published means and deviations of `scale=standard`."""
_NOISE_IMAGES = 400
_NOISE_SIDE = 32


def scattering(pixels: Tensor) -> Tensor:
    """Order 0, 1 and 2 scattering coefficients at two scales, normalized in 27 groups of channels for each image.

    A linear classifier on these features is the strong private baseline of Tramèr and Boneh 2021.

    Args:
        pixels: (N, H, W, C) in [0, 1]; H and W are multiples of four.

    Returns:
        (N, H/4, W/4, 81·C), contiguous.

    Raises:
        ConfigurationError: The sides are no multiples of four.
    """
    _require(pixels, _BLOCK, "scattering")

    def normalized(images: Tensor) -> Tensor:
        features = _coefficients(images, 0.0).flatten(1, 2)
        return F.group_norm(features, GROUPS).permute(0, 2, 3, 1)

    return _by_pieces(normalized, pixels)


def color_scattering(pixels: Tensor) -> Tensor:
    """Scattering coefficients of brightness and two differences of colors, each order normalized by itself.

    Four things that `scattering` does otherwise: edges of color are seen apart from those of brightness; the average of
    the pixels, which is dozens of times as large, does not share a group of the normalization with what the finest
    wavelets find; averages are taken around the centers of blocks; and each feature is centered, and brought half way
    to one size (divided by the root of its deviation), by what it is on images of 1/f noise, which photographs
    resemble.

    Args:
        pixels: (N, H, W, C) in [0, 1], C = 1 or 3 (red, green, blue); H and W are multiples of four.

    Returns:
        (N, H/4, W/4, 81·C), contiguous.

    Raises:
        ConfigurationError: The sides are no multiples of four.
    """
    _require(pixels, _BLOCK, "color_scattering")
    return _by_pieces(lambda images: _of_colors(images).flatten(1, 2).permute(0, 2, 3, 1), pixels)


def mirrored_scattering(pixels: Tensor) -> Tensor:
    """`color_scattering` of an image and of its mirror image, added up: half as many numbers.

    For images that mean the same when mirrored: a linear classifier that answers for an image as for its mirror image
    has no use for the other half, and its gradient gets no noise there. (The sum is the same for both up to the grid of
    every second pixel on which the coarse wavelets stand.)

    Args:
        pixels: (N, H, W, C) in [0, 1], C = 1 or 3 (red, green, blue); H and W are multiples of eight.

    Returns:
        (N, H/4, W/8, 81·C), contiguous.

    Raises:
        ConfigurationError: The sides are no multiples of eight.
    """
    _require(pixels, 2 * _BLOCK, "mirrored_scattering")
    half = pixels.shape[2] // (2 * _BLOCK)
    mirrored = _mirrored()

    def folded(images: Tensor) -> Tensor:
        features = _of_colors(images)
        both = (features + features[:, :, mirrored].flip(-1)) / math.sqrt(2)
        return both[..., :half].flatten(1, 2).permute(0, 2, 3, 1)

    return _by_pieces(folded, pixels)


def _require(pixels: Tensor, divisor: int, name: str) -> None:
    *_, height, width, channels = pixels.shape
    if height % divisor or width % divisor or min(height, width) < _SMALLEST:
        raise ConfigurationError(
            f"data.features={name} needs images with sides from {_SMALLEST} on that {divisor} divides, not "
            f"{(height, width)}: set data.image_size."
        )
    if name != "scattering" and channels not in (1, 3):
        raise ConfigurationError(
            f"data.features={name} needs images of 1 or 3 channels, not {channels}: take data.features=scattering."
        )


def _by_pieces(features: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """`features` (n, h, w, F) of images (n, C, H, W), a few at once; gigabytes, so that they are held only once."""
    images = pixels.permute(0, 3, 1, 2).float()
    found = torch.empty(len(images), *features(images[:1]).shape[1:])
    for some, room in zip(torch.split(images, _PIECE), torch.split(found, _PIECE), strict=True):
        room.copy_(features(some))
    return found


def _coefficients(images: Tensor, center: float) -> Tensor:
    """Not normalized, (N, C, H, W) → (N, C, 81, H/4, W/4), averages around `center` and every fourth pixel beyond."""
    height, width = images.shape[2:]
    banks = _wavelets(0), _wavelets(1)
    planes = images.reshape(-1, 1, height, width)
    fine = _modulus(planes, banks[0], 1)
    coarse = _modulus(planes, banks[1], 2)
    second = _modulus(fine.reshape(-1, 1, height, width), banks[1], 2).view(
        len(planes),
        -1,
        height // 2,
        width // 2,
    )
    means = [_average(x, spacing, center) for x, spacing in ((planes, 1), (fine, 1), (coarse, 2), (second, 2))]
    return torch.cat(means, 1).view(
        *images.shape[:2],
        PER_CHANNEL,
        height // _BLOCK,
        width // _BLOCK,
    )


def _of_colors(images: Tensor) -> Tensor:
    """Of brightness and colors, normalized, (N, C, H, W) → (N, C, 81, H/4, W/4)."""
    colors = images if images.shape[1] == 1 else torch.einsum("oc,nchw->nohw", torch.tensor(_COLORS), images)
    means, deviations = (x[: images.shape[1], :, None, None] for x in _of_noise())
    return (_by_order(colors) - means) / deviations.sqrt()


def _by_order(colors: Tensor) -> Tensor:
    """Normalized within each image, order by order, (N, C, H, W) → (N, C, 81, H/4, W/4).

    The epsilon of `group_norm` damps what is faint: the second order, and the colors of a gray image.
    """
    count = colors.shape[1]
    pixels, fine, coarse, second = torch.split(_coefficients(colors, _CENTER), _ORDERS, 2)
    middle, unit = (torch.tensor(x[:count]).view(-1, 1, 1, 1) for x in (_MIDDLE, _UNIT))
    found = [(pixels - middle) / unit]
    for part, groups in ((fine, 1), (coarse, 1), (second, ORIENTATIONS)):  # of each color
        flat = part.flatten(1, 2)
        found.append(F.group_norm(flat, groups * count, eps=1e-5).view_as(part))
    return torch.cat(found, 2)


@cache
def _of_noise() -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature of brightness and colors on 1/f noise, (3, 81) each."""
    side = _NOISE_SIDE
    generator = torch.Generator().manual_seed(0)
    across = torch.fft.rfftfreq(side)
    down = torch.fft.fftfreq(side)
    frequency = torch.hypot(down[:, None], across).clamp(min=1 / side)
    waves = torch.randn(_NOISE_IMAGES, 3, side, side // 2 + 1, 2, generator=generator)
    noise = torch.fft.irfft2(torch.view_as_complex(waves) / frequency, s=(side, side))
    middle, unit = (torch.tensor(x).view(-1, 1, 1) for x in (_MIDDLE, _UNIT))
    images = torch.split(middle + unit * noise / noise.std(), _PIECE)
    features = torch.cat([_by_order(part) for part in images]).transpose(0, 2).flatten(2)  # (81, 3, ·)
    found = features.mean(2).T, features.std(2).T
    mean, deviation = ((x + x[:, _mirrored()]) / 2 for x in found)  # noise knows no left and right
    return mean, deviation


def _mirrored() -> list[int]:
    """Which of the 81 features of a mirror image is which of the image's: direction k is k steps the other way."""
    other = [-k % ORIENTATIONS for k in range(ORIENTATIONS)]
    second = [ORIENTATIONS * first + then for first in other for then in other]
    starts = torch.tensor(_ORDERS).cumsum(0).tolist()
    return [0, *(starts[0] + k for k in other), *(starts[1] + k for k in other), *(starts[2] + k for k in second)]


def _modulus(planes: Tensor, bank: Tensor, stride: int) -> Tensor:
    """|planes * each wavelet| at every `stride`-th pixel, (N, 1, H, W) → (N, orientations, H/stride, W/stride)."""
    reach = bank.shape[-1] // 2
    found = F.conv2d(F.pad(planes, (reach,) * 4, mode="reflect"), bank, stride=stride)
    real, imaginary = found.chunk(2, 1)
    return torch.hypot(real, imaginary)


def _average(planes: Tensor, spacing: int, center: float) -> Tensor:
    """Gaussian averages at every fourth pixel of the image from `center` on, of planes that have every `spacing`-th."""
    down, across = (_averaging(size, spacing, center) for size in planes.shape[2:])
    return down @ planes @ across.mT


def _averaging(size: int, spacing: int, center: float) -> Tensor:
    """The average of a line of `size` points, mirrored at its ends, as a matrix: (size / 4 · spacing, size)."""
    sigma = 2 * _SIGMA / spacing
    reach = math.ceil(3 * sigma)
    mirrored = F.pad(torch.eye(size)[:, None], (reach, reach), mode="reflect")[:, 0]
    centers = (center + torch.arange(0, size * spacing, _BLOCK)) / spacing
    far = torch.arange(-reach, size + reach) - centers[:, None]
    bells = torch.exp(-far.square() / (2 * sigma**2)) * (far.abs() <= reach)
    return (bells / bells.sum(1, keepdim=True)) @ mirrored.mT


def _wavelets(scale: int) -> Tensor:
    """Morlet wavelets in all orientations, real parts before imaginary ones, (2·orientations, 1, K, K)."""
    sigma = _SIGMA * 2**scale
    frequency = _FREQUENCY / 2**scale
    slant = 4 / ORIENTATIONS
    reach = math.ceil(3 * sigma / slant)
    at = torch.arange(-reach, reach + 1, dtype=torch.float64)
    found = []
    for number in range(ORIENTATIONS):
        angle = math.pi * number / ORIENTATIONS
        along = math.cos(angle) * at[None, :] + math.sin(angle) * at[:, None]
        across = math.cos(angle) * at[:, None] - math.sin(angle) * at[None, :]
        bell = torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))
        wave = bell * torch.exp(1j * frequency * along)
        wave = wave - bell * (wave.sum() / bell.sum())  # blind to constants
        found.append(wave * slant / (2 * math.pi * sigma**2))
    bank = torch.stack(found)
    return torch.cat([bank.real, bank.imag])[:, None].float()
