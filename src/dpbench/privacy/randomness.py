"""Random numbers as a function of a key, so that a replay repeats a release."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Sequence
from enum import IntEnum
from functools import cache

import numpy as np
import torch
from torch import Tensor

RANDOM_NUMBERS = 5
"""Counts the changes by which the same key came to give other numbers. Part of the key of the noise: with the dropout
masks of another version, a sum is another one. Part of the replay key: no release of before is repeated after."""
_MT_WORDS = 624
_MT_BYTES = 4 * _MT_WORDS
_MT_OFFSET = 24  # bytes of seed, counters and position before the words in torch's CPU generator state
_SEED_BYTES = 32


class Stream(IntEnum):
    """The second part of every key: the use of the numbers. Two uses with one value would share their numbers."""

    LOTS = 1
    """Draws of records."""
    NOISE = 2
    """The noise of a release."""
    MODEL = 3
    """The module's own randomness, such as dropout."""
    MICROBATCHES = 4
    """Assignment of records to microbatches."""
    NOISE_BATCH = 5
    """Random inputs from which first bounds are found."""
    LOCAL_TRAINING = 6
    """The local training of a user: order of its examples, dropout and the like."""
    AUDIT = 7
    """Coins and coordinates of an audit."""
    ITEMS = 8
    """Draws of a data set, its `collate_fn` and the hooks before a step, such as augmentation."""
    VIEWS = 9
    """The augmented views of each record in a batch."""
    GROUPS = 10
    """The group of records to which each record belongs, where groups take turns."""
    SELECTION = 11
    """The noise on the scores among which the best trial is chosen."""


def fresh_key() -> int:
    """128 bits from the operating system's entropy, for models that will be published."""
    return secrets.randbits(128)


def noise_key(root: int, digest: int, phase: int, release: int, processes: int = 1) -> tuple[int, ...]:
    """Key of a release's noise.

    Args:
        root: Key of the run.
        digest: Digest of the plan: the same unit noise scaled in two ways would reveal the sum.
        phase: Phase of the ledger.
        release: Number of the release.
        processes: Number of processes, if another number of them would make another sum.
    """
    key = (root, Stream.NOISE, RANDOM_NUMBERS, digest, phase, release)
    if processes == 1:
        return key
    return (*key, processes)


def source_of(key: Sequence[int]) -> str:
    """A short hash of a seed and of its use, by which two ledgers show that they drew from one."""
    return digest_of(key).hex()[:16]


def digest_of(key: Sequence[int]) -> bytes:
    """256 bits that are a function of `key`, non-negative integers of any size; itself a key of a cipher."""
    return hashlib.sha256(_encoded(key)).digest()


def keyed_seed(key: Sequence[int]) -> int:
    """A number of 256 bits that is a function of `key`, for APIs that take a single number; can be part of a key."""
    return int.from_bytes(digest_of(key), "big")


def keyed_sequence(key: Sequence[int]) -> np.random.SeedSequence:
    """A seed for numpy's generators that is a function of `key`, integers of any size.

    Hashed, because `SeedSequence` splits large integers into words, so that some different keys would coincide.
    """
    return np.random.SeedSequence(keyed_seed(key))


def keyed_generator(key: Sequence[int], device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator with a state that is entirely a function of `key`.

    `torch.Generator.manual_seed` keeps only 32 bits of its seed on the CPU: of 10,000 releases with hashed seeds, two
    would share their noise in 1 run of 90, and all seeds could be tried. So the Mersenne Twister's 624 words are
    filled from a hash of the key. The generator is not cryptographic.

    Args:
        key: Non-negative integers of any size, such as (root key, phase, release).
        device: Device on which the numbers will be drawn. CUDA generators (Philox) take 64 bits of the key as their
            seed, and 61 as the place in its sequence where they begin; others 64.
    """
    generator = torch.Generator(device)
    _set_state(generator, _expanded(key, _MT_BYTES))
    return generator


def seed_global_generators(key: Sequence[int], device: torch.device) -> None:
    """Put the global generators of torch (of the CPU and of `device`), numpy and `random` into states of a key.

    Never by a seed of 32 bits, all of which could be tried: dropout masks that an attacker knows would tell of a
    record, since one more in a batch moves those of all others.

    (Not by `torch.manual_seed`: on machines without a GPU it would note a stack trace for the day that one is
    initialized, a millisecond a step, and a list that grows for ever.)

    Args:
        key: Non-negative integers of any size, of which all numbers drawn from here on are a function.
        device: Device of the model.
    """
    stream = _expanded(key, _MT_BYTES + 2 * _SEED_BYTES)
    if device.type == "cuda":
        for generator in torch.cuda.default_generators:
            _set_state(generator, stream)
    elif device.type != "cpu":
        torch.manual_seed(int.from_bytes(stream[:8], "big"))
    _set_state(torch.default_generator, stream)
    numpy_seed = np.frombuffer(stream, np.uint32, count=_SEED_BYTES // 4, offset=_MT_BYTES)
    np.random.seed(numpy_seed)  # by the whole array
    random.seed(int.from_bytes(stream[-_SEED_BYTES:], "big"))


def _expanded(key: Sequence[int], size: int) -> bytes:
    return hashlib.shake_256(_encoded(key)).digest(size)


def _encoded(key: Sequence[int]) -> bytes:
    # By `int`, because enumerations and numpy's integers have another `repr`.
    return repr([int(part) for part in key]).encode()


def _set_state(generator: torch.Generator, stream: bytes) -> None:
    """Fill a generator from the beginning of a stream of random bytes."""
    if generator.device.type == "cpu":
        state = _fresh_state().clone()
        end = _MT_OFFSET + 8 * _MT_WORDS
        words = state.numpy()[_MT_OFFSET:end].view(np.uint64)
        words[:] = np.frombuffer(stream, np.uint32, _MT_WORDS)
        generator.set_state(state)
        return
    generator.manual_seed(int.from_bytes(stream[:8], "big"))
    if generator.device.type == "cuda":
        offset = int.from_bytes(stream[8:16], "big") >> 3  # far from the end of the sequence
        generator.set_offset(offset << 2)  # a multiple of four


@cache
def _fresh_state() -> Tensor:
    return torch.Generator().manual_seed(0).get_state()
