"""Gaussian noise, keyed by run and release, so that a replay repeats a release instead of spending another.

Floating point: noise is drawn and added in the dtype of the sum (float32 as a rule), not on a discrete grid.
The guarantee is that of the ideal Gaussian mechanism; the attacks of Mironov (2012) on floating-point noise are
out of scope, as they are for Opacus and jax_privacy.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpbench.privacy import kernels

_MT_WORDS = 624
_MT_OFFSET = 24  # bytes of seed, counters and position before the words in torch's CPU generator state


def fresh_key() -> int:
    """128 bits from the operating system's entropy, for models that will be published."""
    return secrets.randbits(128)


def keyed_sequence(key: Sequence[int]) -> np.random.SeedSequence:
    """A seed for numpy's generators that is a function of `key`, integers of any size.

    Hashed, because `SeedSequence` splits large integers into words, so that some different keys would coincide.
    """
    digest = hashlib.sha256(repr([int(part) for part in key]).encode()).digest()
    return np.random.SeedSequence(int.from_bytes(digest, "big"))


def keyed_generator(key: Sequence[int], device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose whole state is a function of `key`.

    `torch.Generator.manual_seed` keeps only 32 bits of its seed on the CPU: of 10,000 releases with hashed seeds, two
    would share their noise in 1 run of 90, and anybody could try all seeds. So the Mersenne Twister's 624 words are
    filled from a hash of the key. The generator is not cryptographic.

    Args:
        key: Non-negative integers of any size, such as (root key, phase, release).
        device: Where the numbers will be drawn. CUDA generators take 64 bits of the key.
    """
    digest = hashlib.shake_256(repr([int(part) for part in key]).encode())
    generator = torch.Generator(device)
    if generator.device.type != "cpu":
        return generator.manual_seed(int.from_bytes(digest.digest(8), "big") >> 1)
    words = np.frombuffer(digest.digest(4 * _MT_WORDS), np.uint32).astype(np.uint64)
    state = _fresh_state().clone()
    state[_MT_OFFSET : _MT_OFFSET + 8 * _MT_WORDS] = torch.from_numpy(words.view(np.uint8))
    return generator.set_state(state)


@cache
def _fresh_state() -> Tensor:
    return torch.Generator().manual_seed(0).get_state()


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
