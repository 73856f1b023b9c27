"""Random numbers that are a function of a key, so that a replay repeats a release instead of spending another."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from torch import Tensor

RANDOM_NUMBERS = 3
"""Counts the changes by which the same key came to give other numbers. Part of the key of the noise: with the dropout
masks of another version, a sum is another one. Part of the replay key: no release of before is repeated after."""
_MT_WORDS = 624
_MT_OFFSET = 24  # bytes of seed, counters and position before the words in torch's CPU generator state


class Stream(IntEnum):
    """The second part of every key: what the numbers are for. Two uses that shared one would share their numbers."""

    LOTS = 1
    """Which records are drawn."""
    NOISE = 2
    """The noise of a release."""
    MODEL = 3
    """The module's own randomness, such as dropout."""
    MICROBATCHES = 4
    """Which microbatch a record is put into."""
    NOISE_BATCH = 5
    """Random inputs from which first bounds are found."""
    LOCAL_TRAINING = 6
    """The local training of a user: order of its examples, dropout and the like."""
    CANARIES = 7
    """Coins and coordinates of an audit."""


def fresh_key() -> int:
    """128 bits from the operating system's entropy, for models that will be published."""
    return secrets.randbits(128)


def noise_key(root: int, digest: int, phase: int, release: int, processes: int = 1) -> tuple[int, ...]:
    """Key of a release's noise.

    Args:
        root: Of the run.
        digest: Of what is released: the same unit noise scaled in two ways would reveal the sum.
        phase: Of the ledger.
        release: Number of the release.
        processes: That make a sum which another number of them would not.
    """
    key = root, Stream.NOISE, RANDOM_NUMBERS, digest, phase, release
    return key if processes == 1 else (*key, processes)


def source_of(key: Sequence[int]) -> str:
    """A short hash of a seed (with what else separates its uses), by which two ledgers tell that they drew from one."""
    return digest_of(key).hex()[:16]


def digest_of(key: Sequence[int]) -> bytes:
    """256 bits that are a function of `key`, non-negative integers of any size; itself a key of a cipher."""
    return hashlib.sha256(repr([int(part) for part in key]).encode()).digest()


def keyed_seed(key: Sequence[int]) -> int:
    """A seed of 62 bits for `torch.manual_seed` that is a function of `key`."""
    return int.from_bytes(digest_of(key)[:8], "big") >> 2


def keyed_sequence(key: Sequence[int]) -> np.random.SeedSequence:
    """A seed for numpy's generators that is a function of `key`, integers of any size.

    Hashed, because `SeedSequence` splits large integers into words, so that some different keys would coincide.
    """
    return np.random.SeedSequence(int.from_bytes(digest_of(key), "big"))


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
