"""Scattering features: fixed wavelets, moduli and averages, known without any data (Bruna and Mallat 2013)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.errors import ConfigurationError

ORIENTATIONS, GROUPS = 8, 27
BLOCK, PER_CHANNEL = 4, 81
"""Pixels of a side for one output, and features of a channel."""
_SIGMA, _FREQUENCY = 0.8, 0.75 * math.pi  # of the finest wavelet
_PIECE = 100  # images at once


def scattering(pixels: Tensor) -> Tensor:
    """Order 0, 1 and 2 scattering coefficients at two scales, normalized in 27 groups of channels for each image.

    Each image is treated by itself, and the wavelets are fixed: no privacy is spent. A linear classifier on these
    features is the strong private baseline of Tramèr and Boneh 2021.

    Args:
        pixels: (N, H, W, C) in [0, 1]; H and W are multiples of four.

    Returns:
        (N, H/4, W/4, 81·C), contiguous.

    Raises:
        ConfigurationError: The sides are no multiples of four.
    """
    if pixels.shape[1] % BLOCK or pixels.shape[2] % BLOCK:
        raise ConfigurationError(
            f"data.features=scattering needs images with sides that 4 divides, not {tuple(pixels.shape[1:3])}: set "
            "data.image_size."
        )
    banks = _wavelets(0), _wavelets(1)
    return torch.cat([_coefficients(part.permute(0, 3, 1, 2), banks) for part in torch.split(pixels, _PIECE)])


def _coefficients(images: Tensor, banks: tuple[Tensor, Tensor]) -> Tensor:
    height, width = images.shape[2:]
    planes = images.reshape(-1, 1, height, width)
    fine, coarse = _modulus(planes, banks[0], 1), _modulus(planes, banks[1], 2)
    second = _modulus(fine.reshape(-1, 1, height, width), banks[1], 2).view(len(planes), -1, height // 2, width // 2)
    means = [_average(planes, 1), _average(fine, 1), _average(coarse, 2), _average(second, 2)]
    features = torch.cat(means, 1).view(len(images), -1, height // BLOCK, width // BLOCK)
    return F.group_norm(features, GROUPS).permute(0, 2, 3, 1).contiguous()


def _modulus(planes: Tensor, bank: Tensor, stride: int) -> Tensor:
    """|planes * each wavelet| at every `stride`-th pixel, (N, 1, H, W) → (N, orientations, H/stride, W/stride)."""
    reach = bank.shape[-1] // 2
    found = F.conv2d(F.pad(planes, (reach,) * 4, mode="reflect"), bank, stride=stride)
    real, imaginary = found.chunk(2, 1)
    return torch.hypot(real, imaginary)


def _average(planes: Tensor, spacing: int) -> Tensor:
    """Gaussian averages at every fourth pixel of the image, of planes that have every `spacing`-th."""
    down, across = (_averaging(size, spacing) for size in planes.shape[2:])
    return down @ planes @ across.mT


def _averaging(size: int, spacing: int) -> Tensor:
    """The average of a line of `size` points, mirrored at its ends, as a matrix: (size / 4 · spacing, size)."""
    sigma, stride = 2 * _SIGMA / spacing, BLOCK // spacing
    reach = math.ceil(3 * sigma)
    at = torch.arange(-reach, reach + 1, dtype=torch.float32)
    bell = torch.exp(-at.square() / (2 * sigma**2))
    points = F.pad(torch.eye(size)[:, None], (reach, reach), mode="reflect")
    return F.conv1d(points, (bell / bell.sum()).view(1, 1, -1), stride=stride)[:, 0].mT


def _wavelets(scale: int) -> Tensor:
    """Morlet wavelets in all orientations, real parts before imaginary ones, (2·orientations, 1, K, K)."""
    sigma, frequency, slant = _SIGMA * 2**scale, _FREQUENCY / 2**scale, 4 / ORIENTATIONS
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
