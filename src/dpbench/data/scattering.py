"""Scattering features: fixed wavelets, moduli and averages, known without any data (Bruna and Mallat 2013).

Each image is treated by itself, and all constants are fixed here or computed of noise: no privacy is spent.
`color_scattering` and `mirrored_scattering` were designed by looking at CIFAR-10's training data (at the cost in
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
"""Of channels, normalized together."""
PER_CHANNEL = 81
"""Features of a channel."""
_BLOCK = 4  # pixels of a side for one output
_ORDERS = (1, ORIENTATIONS, ORIENTATIONS, ORIENTATIONS**2)
"""Features of a channel: averages of pixels, of fine and coarse moduli, and of coarse moduli of fine ones."""
_CENTER = (_BLOCK - 1) / 2  # of a block
_SIGMA = 0.8  # of the finest wavelet
_FREQUENCY = 0.75 * math.pi
_PIECE = 100  # images at once
_SMALLEST = 12  # pixels of a side
_COLORS = ((1 / 3, 1 / 3, 1 / 3), (1 / 2, -1 / 2, 0.0), (1 / 4, 1 / 4, -1 / 2))
"""Brightness, red against green, yellow against blue."""
# Of their pixels: round numbers, fixed for all data, like the published means and deviations of `scale=standard`.
_MEANS = (0.5, 0.0, 0.0)
_SCALES = (0.25, 0.05, 0.05)
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

    return by_pieces(normalized, pixels)


def color_scattering(pixels: Tensor) -> Tensor:
    """Scattering coefficients of brightness and two differences of colors, each order normalized by itself.

    Four things that `scattering` does otherwise: edges of color are seen apart from those of brightness; the average of
    the pixels, which is dozens of times as large, does not share a group of the normalization with the output of the
    finest wavelets; averages are taken around the centers of blocks; and each feature is centered, and brought half way
    to one size (divided by the root of its deviation), by its statistics on images of 1/f noise, which photographs
    resemble.

    Args:
        pixels: (N, H, W, C) in [0, 1], C = 1 or 3 (red, green, blue); H and W are multiples of four.

    Returns:
        (N, H/4, W/4, 81·C), contiguous.

    Raises:
        ConfigurationError: The sides are no multiples of four.
    """
    _require(pixels, _BLOCK, "color_scattering")
    return by_pieces(lambda images: _color_features(images).flatten(1, 2).permute(0, 2, 3, 1), pixels)


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

    def folded(images: Tensor) -> Tensor:
        features = _color_features(images)
        sums = (features + features[:, :, _mirrored()].flip(-1)) / math.sqrt(2)
        left_half = sums[..., : sums.shape[-1] // 2]
        return left_half.flatten(1, 2).permute(0, 2, 3, 1)

    return by_pieces(folded, pixels)


def _require(pixels: Tensor, divisor: int, name: str) -> None:
    _, height, width, channels = pixels.shape
    if height % divisor or width % divisor or min(height, width) < _SMALLEST:
        raise ConfigurationError(
            f"data.features={name} needs images with sides from {_SMALLEST} on that {divisor} divides, not "
            f"{(height, width)}: set data.image_size."
        )
    if name != "scattering" and channels not in (1, 3):
        raise ConfigurationError(
            f"data.features={name} needs images of 1 or 3 channels, not {channels}: take data.features=scattering."
        )


def by_pieces(features: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
    """Features (n, h, w, F) of images (n, C, H, W), a few at once; gigabytes, so that they are in memory only once."""
    images = pixels.permute(0, 3, 1, 2).float()
    output = torch.empty(len(images), *features(images[:1]).shape[1:])
    for start in range(0, len(images), _PIECE):
        output[start : start + _PIECE] = features(images[start : start + _PIECE])
    return output


def _coefficients(images: Tensor, center: float) -> Tensor:
    """Not normalized, (N, C, H, W) → (N, C, 81, H/4, W/4), averages around `center` and every fourth pixel beyond."""
    count, channels, height, width = images.shape
    fine_wavelets = _wavelets(0)
    coarse_wavelets = _wavelets(1)
    planes = images.reshape(-1, 1, height, width)
    fine = _modulus(planes, fine_wavelets, 1)
    coarse = _modulus(planes, coarse_wavelets, 2)
    second = _modulus(fine.reshape(-1, 1, height, width), coarse_wavelets, 2)
    second = second.view(len(planes), -1, height // 2, width // 2)
    orders = [
        _average(planes, 1, center),
        _average(fine, 1, center),
        _average(coarse, 2, center),
        _average(second, 2, center),
    ]
    return torch.cat(orders, 1).view(count, channels, PER_CHANNEL, height // _BLOCK, width // _BLOCK)


def _color_features(images: Tensor) -> Tensor:
    """Features of brightness and colors, normalized, (N, C, H, W) → (N, C, 81, H/4, W/4)."""
    channels = images.shape[1]
    colors = images if channels == 1 else torch.einsum("oc,nchw->nohw", torch.tensor(_COLORS), images)
    means, deviations = _noise_statistics()
    means = means[:channels, :, None, None]
    deviations = deviations[:channels, :, None, None]
    return (_normalized_by_order(colors) - means) / deviations.sqrt()


def _normalized_by_order(colors: Tensor) -> Tensor:
    """Normalized within each image, order by order, (N, C, H, W) → (N, C, 81, H/4, W/4).

    The epsilon of `group_norm` damps faint features: the second order, and the colors of a gray image.
    """
    channels = colors.shape[1]
    pixels, fine, coarse, second = torch.split(_coefficients(colors, _CENTER), list(_ORDERS), 2)
    means = torch.tensor(_MEANS[:channels]).view(-1, 1, 1, 1)
    scales = torch.tensor(_SCALES[:channels]).view(-1, 1, 1, 1)
    return torch.cat(
        [
            (pixels - means) / scales,
            _group_norm(fine, channels),
            _group_norm(coarse, channels),
            _group_norm(second, ORIENTATIONS * channels),
        ],
        2,
    )


def _group_norm(features: Tensor, groups: int) -> Tensor:
    return F.group_norm(features.flatten(1, 2), groups, eps=1e-5).view_as(features)


@cache
def _noise_statistics() -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature of brightness and colors on 1/f noise, (3, 81) each."""
    side = _NOISE_SIDE
    generator = torch.Generator().manual_seed(0)
    frequency = torch.hypot(torch.fft.fftfreq(side)[:, None], torch.fft.rfftfreq(side)).clamp(min=1 / side)
    waves = torch.randn(_NOISE_IMAGES, 3, side, side // 2 + 1, 2, generator=generator)
    noise = torch.fft.irfft2(torch.view_as_complex(waves) / frequency, s=(side, side))
    means = torch.tensor(_MEANS).view(-1, 1, 1)
    scales = torch.tensor(_SCALES).view(-1, 1, 1)
    images = torch.split(means + scales * noise / noise.std(), _PIECE)
    features = torch.cat([_normalized_by_order(piece) for piece in images])
    features = features.transpose(0, 2).flatten(2)  # (81, 3, ·)
    return _symmetric(features.mean(2).T), _symmetric(features.std(2).T)


def _symmetric(statistic: Tensor) -> Tensor:
    """The mean of (3, 81) and of mirror images: noise knows no left and right."""
    return (statistic + statistic[:, _mirrored()]) / 2


def _mirrored() -> list[int]:
    """Order of the 81 features of a mirror image among the image's: direction k is k steps the other way."""
    turned = [-k % ORIENTATIONS for k in range(ORIENTATIONS)]
    places = [0]  # the average has no direction
    for start in (1, 1 + ORIENTATIONS):
        places += [start + k for k in turned]
    for first in turned:
        start = 1 + 2 * ORIENTATIONS + ORIENTATIONS * first
        places += [start + k for k in turned]
    return places


def _modulus(planes: Tensor, bank: Tensor, stride: int) -> Tensor:
    """|planes * each wavelet| at every `stride`-th pixel, (N, 1, H, W) → (N, orientations, H/stride, W/stride)."""
    reach = bank.shape[-1] // 2
    padded = F.pad(planes, (reach,) * 4, mode="reflect")
    real, imaginary = F.conv2d(padded, bank, stride=stride).chunk(2, 1)
    return torch.hypot(real, imaginary)


def _average(planes: Tensor, spacing: int, center: float) -> Tensor:
    """Gaussian averages at every fourth pixel of the image from `center` on, of planes that have every `spacing`-th."""
    height, width = planes.shape[2:]
    return _averaging(height, spacing, center) @ planes @ _averaging(width, spacing, center).mT


def _averaging(size: int, spacing: int, center: float) -> Tensor:
    """The average of a line of `size` points, mirrored at its ends, as a matrix: (size / 4 · spacing, size)."""
    sigma = 2 * _SIGMA / spacing
    reach = math.ceil(3 * sigma)
    mirrored = F.pad(torch.eye(size)[:, None], (reach, reach), mode="reflect")[:, 0]
    centers = (center + torch.arange(0, size * spacing, _BLOCK)) / spacing
    distances = torch.arange(-reach, size + reach) - centers[:, None]
    bells = torch.exp(-distances.square() / (2 * sigma**2)) * (distances.abs() <= reach)
    return (bells / bells.sum(1, keepdim=True)) @ mirrored.mT


def _wavelets(scale: int) -> Tensor:
    """Morlet wavelets in all orientations, real parts before imaginary ones, (2·orientations, 1, K, K)."""
    sigma = _SIGMA * 2**scale
    frequency = _FREQUENCY / 2**scale
    slant = 4 / ORIENTATIONS
    reach = math.ceil(3 * sigma / slant)
    x = torch.arange(-reach, reach + 1, dtype=torch.float64)
    y = x[:, None]
    wavelets = []
    for number in range(ORIENTATIONS):
        angle = math.pi * number / ORIENTATIONS
        along = math.cos(angle) * x + math.sin(angle) * y
        across = math.cos(angle) * y - math.sin(angle) * x
        bell = torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))
        wave = bell * torch.exp(1j * frequency * along)
        wave = wave - bell * (wave.sum() / bell.sum())  # blind to constants
        wavelets.append(wave * slant / (2 * math.pi * sigma**2))
    bank = torch.stack(wavelets)
    return torch.cat([bank.real, bank.imag])[:, None].float()
