"""The stream of noise as RFC 8439 and Box and Muller write it, in numpy: the oracle of both tiers of kernels."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

KEY = bytes(range(32))


def chacha20(key: bytes, counters: NDArray[np.uint64], nonce: tuple[int, int] = (0, 0)) -> NDArray[np.uint32]:
    """Blocks (16, len(counters)), word by word as RFC 8439 writes it."""
    x = np.zeros((16, len(counters)), np.uint32)
    x[:4] = np.array([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], np.uint32)[:, None]
    x[4:12] = np.frombuffer(key, "<u4")[:, None]
    x[12], x[13] = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    x[14:] = np.array(nonce, np.uint32)[:, None]
    start = x.copy()

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for p, q, r, n in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[p] += x[q]
            mixed = x[r] ^ x[p]
            x[r] = (mixed << np.uint32(n)) | (mixed >> np.uint32(32 - n))

    for _ in range(10):
        for i, shift in itertools.product((0,), (0, 1)):
            for column in range(4):
                quarter(
                    column + i, 4 + (column + shift) % 4, 8 + (column + 2 * shift) % 4, 12 + (column + 3 * shift) % 4
                )
    return x + start


def pairs_of_blocks(blocks: NDArray[np.uint64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Radius and angle of each pair, (8, blocks) each, in float64: words i and 8 + i of a block are a pair."""
    first, second = np.split(chacha20(KEY, blocks), 2)
    part = first + 0.5
    word, block = np.nonzero(first < 2**20)
    group, lane = np.divmod(blocks[block], np.uint64(16))
    more = chacha20(KEY, group * np.uint64(128) + word.astype(np.uint64) * np.uint64(16) + lane, (1, 0))
    part[word, block] = first[word, block] + (more[0] * 2.0**32 + more[1] + 0.5) / 2.0**64
    return np.sqrt(-2 * np.log(part / 2**32)), 2 * np.pi * second / 2.0**32


def normal_numbers(groups: int) -> NDArray[np.float64]:
    """The first 256 numbers of each of so many groups of the stream of `KEY`."""
    blocks = np.arange(16 * groups, dtype=np.uint64)
    radius, angle = (x.reshape(8, groups, 16).transpose(1, 0, 2) for x in pairs_of_blocks(blocks))
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)
