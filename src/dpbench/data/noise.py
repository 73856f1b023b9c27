"""Noise in the place of data: it needs no budget, and can only be memorized."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Split = Literal["train", "test"]

NOISE_SIZES: dict[Split, int] = {"train": 50_000, "test": 10_000}
"""Images of noise in each split unless another number is asked for: as many as CIFAR-10 has."""
# Of the generator, whose labels shall depend neither on the number nor on the shape of the images.
_BYTES_BEFORE_LABELS: dict[Split, int] = {split: size * 32 * 32 * 3 for split, size in NOISE_SIZES.items()}
_SPLIT_KEYS: dict[Split, int] = {"train": 0, "test": 1}


def noise_split(
    split: Split,
    shape: tuple[int, ...],
    num_classes: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw uniform pixels with random labels; the first of them are the same for any number of them.

    Args:
        split: Both splits have keys of their own.
        shape: (N, H, W, C).
        num_classes: Number of labels.

    Returns:
        Pixels (N, H, W, C) and labels (N,).
    """
    key = [2018, _SPLIT_KEYS[split]]
    total = math.prod(shape)
    before_labels = _BYTES_BEFORE_LABELS[split]
    pixels = np.random.default_rng(key).integers(0, 256, min(total, before_labels), dtype=np.uint8)
    if total > before_labels:
        further = np.random.default_rng([*key, 1])
        pixels = np.append(pixels, further.integers(0, 256, total - before_labels, dtype=np.uint8))
    # The generator makes eight pixels of each 64 bits that it draws.
    bits = np.random.PCG64(np.random.SeedSequence(key)).advance(before_labels // 8)
    labels = np.random.Generator(bits).integers(0, num_classes, shape[0])
    return pixels.reshape(shape), labels


def labeled_noise(
    size: int,
    generator: torch.Generator,
    shape: tuple[int, int, int],
    num_classes: int,
    prepare: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Draw a batch of uniform noise with random labels.

    Args:
        size: N.
        generator: Generator of torch, on the CPU.
        shape: (H, W, C).
        num_classes: Number of labels.
        prepare: Function that turns pixels into a network's input; may work in place.

    Returns:
        Images (N, C, H, W) and labels (N,).
    """
    pixels = prepare(torch.rand(size, *shape, generator=generator))
    labels = torch.randint(num_classes, (size,), generator=generator)
    return pixels.permute(0, 3, 1, 2), labels


def token_noise(
    size: int,
    generator: torch.Generator,
    length: int,
    vocabulary_size: int,
) -> tuple[Tensor, Tensor]:
    """Draw random tokens, inputs and targets (size, length), without padding."""
    tokens = torch.randint(1, vocabulary_size, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]
