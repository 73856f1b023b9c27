"""Gaussian noise on a flat sum.

Floating point: noise is drawn and added in the dtype of the sum (float32 as a rule), not on a discrete grid.
The guarantee is that of the ideal Gaussian mechanism; the attacks of Mironov (2012) on floating-point noise are
out of scope, as they are for Opacus and jax_privacy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpbench.privacy.native import kernels
from dpbench.privacy.randomness import digest_of, keyed_generator


def add_gaussian_noise(total: Tensor, noise_stds: Sequence[tuple[int, float]], key: Sequence[int]) -> Tensor:
    """Add independent Gaussian noise to a flat sum, in place.

    On the CPU the native kernels, where they can be had, draw the numbers from ChaCha20 on all threads, several times
    faster than PyTorch's generator; the two tiers give different noise.

    Args:
        total: Flat sum of clipped gradients, shape (D,).
        noise_stds: Consecutive segments as (length, standard deviation); the lengths add up to D.
        key: Of which the noise is a function: integers that were not used before.

    Returns:
        `total`.
    """
    native = kernels.suits(total) and total.is_contiguous()
    if native:
        cipher_key = digest_of(key)
    else:
        noise = torch.empty_like(total).normal_(generator=keyed_generator(key, total.device))
    start = 0
    for length, std in noise_stds:
        piece = total[start : start + length]
        if native:
            kernels.add_noise(piece, start, std, cipher_key)
        else:
            piece.add_(noise[start : start + length], alpha=std)
        start += length
    if start != total.numel():
        raise ValueError(f"noise segments cover {start} of {total.numel()} coordinates")
    return total


def checksum(total: Tensor) -> float:
    """Sum of a flat tensor in float64, by which it is known again; not finite where one of them is not."""
    if kernels.suits(total) and total.is_contiguous():
        return kernels.float64_sum(total)
    return float(total.sum(dtype=torch.float64))
