"""Gaussian noise on a flat sum, on a grid.

A release is a multiple of a fixed spacing h, the power of two between σ/512 and σ/256: the one nearest to sum +
noise.

Low bits (Mironov 2012). Noise of finite precision may reach values from one sum that it cannot reach from another, and
such a coordinate tells the two apart, at any ε. Here sum and noise are added in float64, with all of their digits, and
only their rounded total is seen. Rounding is post-processing, so the guarantee is that of the noise before it. That
comes from more than 2^48 pairs of a radius and an angle, and lies evenly within the cells of the grid wherever the
sum is: each cell near every sum has its Gaussian probability, but for a relative error of some 10^-6. Rounding the
sum alone would not do: two neighbors' sums could move apart by h√D. The rounding adds h²/12, at most 1.3e-6 of the
noise's variance, and no bias.

Tails. A radius takes 32 bits, and where it is beyond 4 standard deviations, at least 63 more: the noise ends beyond
11.5 (`NOISE_END`) instead of at 6.8, and is exact before. The cost of an end: `accounting.tails`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpbench.privacy import kernels
from dpbench.privacy.randomness import digest_of, keyed_generator, keyed_sequence

Segments = Sequence[tuple[int, float]]
"""Consecutive parts of a flat sum as (length, standard deviation)."""
Draw = Callable[[int], Tensor]
"""size → that many words of 64 random bits, int64, shape (size,)."""

_BITS = 8
"""Binary digits of a standard deviation that the grid keeps."""
_LEAST_INT64 = -(2**63)
_LOW_63_BITS = 2**63 - 1
_MIDDLE = 2**31
"""Offset that makes an int32 a number from 0 to 2^32 − 1."""
_PART = 2**-32
"""Width of one of 2^32 equal parts of (0, 1)."""
_PART_OF_TAIL = 2**-63
"""Width of one of 2^63 equal parts of such a part."""
_ON_DEVICES = (0, 2)
"""Behind the keys of noise on devices: counts, in its second place, the changes by which a key gives other noise there.
No other key is longer by two."""
_TAIL = 2**-12
"""Parts of (0, 1) below give radii beyond √(24 log 2) = 4.08."""
_FINE = 2.0**-40
"""Grid of standard normal numbers, finer than float32 is from 2^-16 on."""
_CPU_CHUNK = 1 << 17
"""Numbers that are drawn together on the CPU: few enough for its caches."""
_DEVICE_CHUNK = 1 << 24
_HASHED = 1 << 20
"""Numbers of 32 bits that are hashed together."""
_GOLDEN_RATIO = 2654435761  # of 2^32


def grid_spacing(std: float) -> float:
    """Spacing of the grid that sums with noise of this standard deviation are rounded to, a power of two.

    >>> grid_spacing(1.0), grid_spacing(1.9), grid_spacing(0.5)
    (0.00390625, 0.00390625, 0.001953125)

    Raises:
        ValueError: `std` is not a positive number.
    """
    if not (math.isfinite(std) and std > 0):
        raise ValueError(f"noise needs a positive standard deviation, not {std}")
    _, exponent = math.frexp(std)
    return math.ldexp(0.5, exponent - _BITS)


def add_gaussian_noise(
    total: Tensor,
    noise_stds: Segments,
    key: Sequence[int],
) -> Tensor:
    """Add independent Gaussian noise to a flat sum and round it to a grid, in place.

    On the CPU the native kernels, where they can be had, draw the numbers from ChaCha20 on all threads, several times
    faster than PyTorch's generator; kernels of a plug-in draw theirs where they are chosen. PyTorch's generators give
    different noise.

    Args:
        total: Flat sum of clipped gradients over all processes, shape (D,).
        noise_stds: Segments; the lengths add up to D.
        key: Key of the noise: integers that were not used before.

    Returns:
        `total`.

    Raises:
        ValueError: The segments do not cover the sum, or a standard deviation is not positive.
    """
    covered = sum(length for length, _ in noise_stds)
    size = total.numel()
    if covered != size:
        raise ValueError(f"noise segments cover {covered} of {size} coordinates")
    suited = _kernels_for(total)
    if suited is not None and total.is_contiguous():
        _add_kernel_noise(total, noise_stds, key, suited)
    else:
        _add_torch_noise(total, noise_stds, _random_words(key, total.device))
    return total


def _kernels_for(total: Tensor) -> kernels.Kernels | None:
    return kernels.suited(total) if total.dtype == torch.float32 else None


def _add_kernel_noise(
    total: Tensor,
    noise_stds: Segments,
    key: Sequence[int],
    suited: kernels.Kernels,
) -> None:
    """Add noise from kernels, in place: a function of the key and of the position of each coordinate."""
    cipher_key = digest_of(key)
    start = 0
    for length, std in noise_stds:
        end = start + length
        suited.add_noise(
            total[start:end],
            start,
            std,
            grid_spacing(std),
            cipher_key,
        )
        start = end


def standard_normal(like: Tensor, key: Sequence[int]) -> Tensor:
    """Draw standard normal numbers by the tier that `add_gaussian_noise` takes for a sum.

    Args:
        like: Flat sum, shape (D,).
        key: Key of the numbers: integers that were not used before.

    Returns:
        In the shape, precision and place of the sum.
    """
    numbers = torch.zeros_like(like)
    suited = _kernels_for(numbers)
    if suited is not None:
        suited.add_noise(numbers, 0, 1.0, _FINE, digest_of(key))
    else:
        numbers.copy_(normal_numbers(len(numbers), _random_words(key, numbers.device)))
    return numbers


def add_on_grid(
    total: Tensor,
    noise_stds: Segments,
    numbers: Tensor,
) -> Tensor:
    """Add given noise to a flat sum and round it to the grid of `add_gaussian_noise`, in place.

    Args:
        total: Flat sum, shape (D,).
        noise_stds: Segments; the lengths add up to D.
        numbers: Noise in units of the standard deviations, shape (D,).

    Returns:
        `total`.
    """

    def given(start: int, end: int) -> Tensor:
        return numbers[start:end].double()

    _add_by_chunks(total, noise_stds, given)
    return total


def _add_torch_noise(
    total: Tensor,
    noise_stds: Segments,
    draw: Draw,
) -> None:
    """Add noise in pure PyTorch, in place.

    Args:
        total: Flat sum, shape (D,).
        noise_stds: Segments; the lengths add up to D.
        draw: Source of random bits.
    """

    def drawn(start: int, end: int) -> Tensor:
        return normal_numbers(end - start, draw)

    _add_by_chunks(total, noise_stds, drawn)


def _add_by_chunks(
    total: Tensor,
    noise_stds: Segments,
    numbers: Callable[[int, int], Tensor],
) -> None:
    """Add noise chunk by chunk, so that float64 copies stay small, and round to the grid.

    Args:
        total: Flat sum, shape (D,); in place.
        noise_stds: Segments; the lengths add up to D.
        numbers: (start, end) → noise of these coordinates in units of the standard deviations, float64, overwritten.
    """
    device = total.device
    chunk_size = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    size = total.numel()
    for start in range(0, size, chunk_size):
        end = min(start + chunk_size, size)
        chunk = total[start:end]
        segments = _overlapping(noise_stds, start, end)
        spacings = []
        for length, segment_std in segments:
            spacings.append((length, grid_spacing(segment_std)))
        std = _per_coordinate(segments, device)
        spacing = _per_coordinate(spacings, device)
        noisy = numbers(start, end)
        noisy.mul_(std)
        noisy.add_(chunk)
        # The sum of both is rounded, in float64: see "Low bits" above. A spacing is a power of two, so that its inverse
        # is exact.
        noisy.mul_(1 / spacing)
        noisy.round_()
        noisy.mul_(spacing)
        chunk.copy_(noisy)


def normal_numbers(size: int, draw: Draw, counts_tail: bool | None = None) -> Tensor:
    """Make standard normal numbers in pure PyTorch by Box-Muller, as the kernels do.

    Args:
        size: How many.
        draw: Source of random bits.
        counts_tail: True to draw further bits only for the pairs far out, one in 4096, which have to be counted; False
            for all pairs, without waiting for the device. None: True on the CPU only.

    Returns:
        Shape (size,), float64: products of a radius and a direction in float32, with all of their digits.
    """
    # A word makes two numbers: half of it is the radius of a pair, half the angle.
    pairs = (size + 1) // 2
    words = draw(pairs)
    if not size:
        return words.double()
    halves = words.view(torch.int32).view(-1, 2)
    radius_bits, angle_bits = halves.unbind(1)
    # The middle of one of 2^32 parts of (0, 1).
    uniform = radius_bits.double()
    uniform.add_(_MIDDLE + 0.5)
    uniform.mul_(_PART)
    is_far_out = uniform < _TAIL
    if counts_tail is None:
        counts_tail = words.device.type == "cpu"
    # Far out 32 bits are too coarse: each part is divided by 63 bits more.
    if not counts_tail:
        fraction = _within_parts(draw(pairs), radius_bits)
        uniform = torch.where(is_far_out, fraction, uniform)
    else:
        tail = is_far_out.nonzero().flatten()
        if len(tail):
            uniform[tail] = _within_parts(draw(len(tail)), radius_bits[tail])
    # √(−2 log u): the root in float32, its product with the direction in float64.
    uniform.log_()
    uniform.mul_(-2)
    radius = uniform.float().sqrt_().double()
    angle = angle_bits.float()
    angle.mul_(math.tau * _PART)
    first_half = radius * angle.cos()
    second_half = radius * angle.sin()
    return torch.cat([first_half, second_half])[:size]


def _within_parts(words: Tensor, radius_bits: Tensor) -> Tensor:
    """Numbers in (0, 1): the middles of one of 2^63 parts of each of 2^32 parts.

    Args:
        words: 64 random bits each.
        radius_bits: Number of the part of 2^32, as int32.
    """
    fraction = words.bitwise_and_(_LOW_63_BITS).double()
    fraction.add_(0.5)
    fraction.mul_(_PART_OF_TAIL)
    # The number of the part from 0 on: beside a negative one of 2^31 the fraction would lose all but 22 of its bits.
    fraction.add_(radius_bits.double().add_(_MIDDLE))
    fraction.mul_(_PART)
    return fraction


def _random_words(key: Sequence[int], device: torch.device) -> Draw:
    """Source of random bits that is a function of `key`: on the CPU numpy's, three times as fast as PyTorch's."""
    if device.type == "cpu":
        rng = np.random.default_rng(keyed_sequence(key))

        def draw_on_cpu(size: int) -> Tensor:
            words = rng.integers(
                low=_LEAST_INT64,
                high=-_LEAST_INT64,
                size=size,
                dtype=np.int64,
            )
            return torch.from_numpy(words)

        return draw_on_cpu
    generator = keyed_generator((*key, *_ON_DEVICES), device)

    def draw_on_device(size: int) -> Tensor:
        words = torch.empty(size, dtype=torch.int64, device=device)
        # None: up to the largest int64.
        return words.random_(_LEAST_INT64, None, generator=generator)

    return draw_on_device


def _overlapping(
    segments: Segments,
    start: int,
    end: int,
) -> list[tuple[int, float]]:
    """Cut consecutive segments to the coordinates from `start` to before `end`."""
    overlapping: list[tuple[int, float]] = []
    segment_start = 0
    for length, std in segments:
        segment_end = segment_start + length
        overlap_start = max(segment_start, start)
        overlap_end = min(segment_end, end)
        overlap = overlap_end - overlap_start
        if overlap > 0:
            overlapping.append((overlap, std))
        segment_start = segment_end
    return overlapping


def _per_coordinate(segments: Segments, device: torch.device) -> Tensor | float:
    """Repeat the number of each segment along its coordinates, shape (sum of lengths,); a float for one segment."""
    if len(segments) == 1:
        _, number = segments[0]
        return number
    size = sum(length for length, _ in segments)
    numbers = torch.empty(size, dtype=torch.float64, device=device)
    start = 0
    # Filled part by part: a device is waited for where numbers of the host are copied to it.
    for length, number in segments:
        numbers[start : start + length].fill_(number)
        start += length
    return numbers


def checksum(total: Tensor) -> str:
    """Hash of the bits of a flat tensor, by which a replay is recognized; the same for every number of threads.

    A sum of the numbers would not do: gradients of a softmax layer add up to zero, whatever the records.
    """
    bits = total.contiguous().view(torch.int32)
    factors = _odd_factors(total.device)
    sums = torch.stack([(chunk * factors[: len(chunk)]).sum() for chunk in torch.split(bits, _HASHED)])
    odd = torch.arange(1, 2 * len(sums), 2, device=total.device)
    return f"{(sums * odd).sum().item() % 2**64:016x}"


@cache
def _odd_factors(device: torch.device) -> Tensor:
    """An odd whole number for each place of a chunk: products of 32 bits lose none of a place's bits."""
    places = torch.arange(_HASHED, device=device)
    return ((places * _GOLDEN_RATIO % 2**32 | 1) - 2**31).to(torch.int32)
