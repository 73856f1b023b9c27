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


def add_gaussian_noise(total: Tensor, noise_stds: Sequence[tuple[int, float]], generator: torch.Generator) -> Tensor:
    """Add independent Gaussian noise to a flat sum, in place.

    On the CPU the native kernels, where they can be had, take a key of 256 bits from the generator and draw the numbers
    from ChaCha20 on all threads, several times faster; the two tiers give different noise.

    Args:
        total: Flat sum of clipped gradients, shape (D,).
        noise_stds: Consecutive segments as (length, standard deviation); the lengths add up to D.
        generator: On the device of `total`.

    Returns:
        `total`.
    """
    native = kernels.suits(total) and total.is_contiguous()
    if native:
        key = torch.randint(256, (32,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    else:
        noise = torch.empty_like(total).normal_(generator=generator)
    start = 0
    for length, std in noise_stds:
        piece = total[start : start + length]
        if native:
            kernels.add_noise(piece, start, std, key)
        else:
            piece.add_(noise[start : start + length], alpha=std)
        start += length
    if start != total.numel():
        raise ValueError(f"noise segments cover {start} of {total.numel()} coordinates")
    return total
