"""Gaussian noise on a flat sum, on a grid.

A release is a multiple of a fixed spacing h, the power of two between σ/512 and σ/256: the one nearest to sum +
noise.

Low bits (Mironov 2012). What noise of finite precision makes of one sum it cannot always make of another, and such
a coordinate tells the two apart, at any ε. Here sum and noise are added in float64, with all of their digits, and
only their rounded total is seen. Rounding is post-processing, so the guarantee is that of the noise before it. That
comes from more than 2^48 pairs of a radius and an angle, and lies evenly within the cells of the grid wherever the
sum is: each cell near every sum has its Gaussian probability, but for a relative error of some 10^-6. Rounding the
sum alone would not do: two neighbors' sums could move apart by h√D. The rounding adds h²/12, at most 1.3e-6 of the
noise's variance, and no bias.

Tails. A radius takes 32 bits, and where it is beyond 4 standard deviations, at least 63 more: the noise ends beyond
11.5 (`NOISE_END`) instead of at 6.8, and is exact before. What an end costs: `accounting.tails`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpbench.privacy.native import kernels
from dpbench.privacy.randomness import digest_of, keyed_generator, keyed_sequence

Segments = Sequence[tuple[int, float]]
"""Consecutive parts of a flat sum as (length, standard deviation)."""
_BITS = 8
"""Binary digits of a standard deviation that the grid keeps."""
Draw = Callable[[int], Tensor]
"""So many words of 64 random bits, int64."""
_BEYOND = 2**-12
"""Parts of (0, 1) below give radii beyond √(24 log 2) = 4.08."""
_AT_ONCE = {"cpu": 1 << 17}
"""Numbers that are drawn together: on the CPU few enough for its caches."""
_AT_ONCE_ELSEWHERE = 1 << 24


def grid_spacing(std: float) -> float:
    """Spacing of the grid that sums with noise of this standard deviation are rounded to, a power of two.

    >>> grid_spacing(1.0), grid_spacing(1.9), grid_spacing(0.5)
    (0.00390625, 0.00390625, 0.001953125)

    Raises:
        ValueError: `std` is not a positive number.
    """
    if not (math.isfinite(std) and std > 0):
        raise ValueError(f"noise needs a positive standard deviation, not {std}")
    return math.ldexp(0.5, math.frexp(std)[1] - _BITS)


def add_gaussian_noise(total: Tensor, noise_stds: Segments, key: Sequence[int]) -> Tensor:
    """Add independent Gaussian noise to a flat sum and round it to a grid, in place.

    On the CPU the native kernels, where they can be had, draw the numbers from ChaCha20 on all threads, several times
    faster than PyTorch's generator; the two tiers give different noise.

    Args:
        total: Flat sum of clipped gradients over all processes, shape (D,).
        noise_stds: Segments; the lengths add up to D.
        key: Of which the noise is a function: integers that were not used before.

    Returns:
        `total`.

    Raises:
        ValueError: The segments do not cover the sum, or a standard deviation is not positive.
    """
    covered = sum(length for length, _ in noise_stds)
    if covered != total.numel():
        raise ValueError(f"noise segments cover {covered} of {total.numel()} coordinates")
    if kernels.suits(total) and total.is_contiguous():
        cipher_key, start = digest_of(key), 0
        for length, std in noise_stds:
            kernels.add_noise(total[start : start + length], start, std, grid_spacing(std), cipher_key)
            start += length
        return total
    draw = _source(key, total.device)
    together = _AT_ONCE.get(total.device.type, _AT_ONCE_ELSEWHERE)
    for start in range(0, total.numel(), together):
        piece = total[start : start + together]
        inside = _within(noise_stds, start, start + len(piece))
        spacing = _along([(length, grid_spacing(std)) for length, std in inside], total.device)
        noise = normal_numbers(len(piece), draw).mul_(_along(inside, total.device))
        noise.add_(piece).mul_(1 / spacing).round_().mul_(spacing)
        piece.copy_(noise)
    return total


def normal_numbers(size: int, draw: Draw) -> Tensor:
    """Make standard normal numbers in pure PyTorch by Box-Muller, as the kernels do.

    Args:
        size: How many.
        draw: Source of random bits.

    Returns:
        Shape (size,), float64: products of a radius and a direction in float32, with all of their digits.
    """
    words = draw((size + 1) // 2)
    first, second = words.view(torch.int32).view(-1, 2).unbind(1)
    part = first.double().add_(2**31 + 0.5).mul_(2**-32)  # the middle of one of 2^32 parts of (0, 1)
    beyond = (part < _BEYOND).nonzero().flatten()
    if len(beyond):  # their parts are divided by 63 bits more
        more = draw(len(beyond)).bitwise_and_(2**63 - 1).double().add_(0.5).mul_(2**-63)
        part[beyond] = more.add_(first[beyond]).add_(2**31).mul_(2**-32)
    radius = part.log_().mul_(-2).float().sqrt_().double()
    angle = second.float().mul_(math.tau / 2**32)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:size]


def _source(key: Sequence[int], device: torch.device) -> Draw:
    """Random bits that are a function of `key`: on the CPU numpy's, three times as fast as PyTorch's."""
    if device.type == "cpu":
        rng = np.random.default_rng(keyed_sequence(key))
        return lambda size: torch.from_numpy(rng.integers(-(2**63), 2**63, size, dtype=np.int64))
    generator = keyed_generator(key, device)
    words = torch.int64
    return lambda size: torch.empty(size, dtype=words, device=device).random_(-(2**63), None, generator=generator)


def _within(segments: Segments, start: int, end: int) -> list[tuple[int, float]]:
    """What lies between two coordinates of consecutive parts."""
    inside, begin = list[tuple[int, float]](), 0
    for length, std in segments:
        overlap = min(begin + length, end) - max(begin, start)
        if overlap > 0:
            inside.append((overlap, std))
        begin += length
    return inside


def _along(parts: Segments, device: torch.device) -> Tensor | float:
    """The number of each coordinate; one for all where there is one part."""
    if len(parts) == 1:
        return parts[0][1]
    lengths, numbers = zip(*parts, strict=True)
    each = torch.tensor(numbers, dtype=torch.float64, device=device)
    return each.repeat_interleave(torch.tensor(lengths, device=device), output_size=sum(lengths))


def checksum(total: Tensor) -> float:
    """Sum of a flat tensor in float64, by which it is known again; not finite where one of them is not."""
    if kernels.suits(total) and total.is_contiguous():
        return kernels.float64_sum(total)
    return float(total.sum(dtype=torch.float64))
