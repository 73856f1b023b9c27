"""Held-out records, and members: each record's own content decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Split = Literal["hash", "permutation"]
Positions = NDArray[np.int64]
_KEY = b"dpbench: who is held out"  # public, and the same for every run, so that runs can be compared on the split
_MEMBERSHIP_KEY = b"dpbench: membership "
_PERMUTATION_SEED = 0
_BITS = 64


def parted(
    split: Split,
    identities: Callable[[], Iterable[bytes]],
    records: int,
    count: int,
) -> tuple[Positions, Positions]:
    """Positions of the records that are held out, and of the others, both ascending.

    With "hash" a record is held out if a keyed hash of its content lies below a threshold. Neither its place nor any
    other record decides, so that data that are neighbors before the split are neighbors after it: epsilon also holds
    for a record of the file. `count` is then the expected number. The threshold takes the number of records in two
    digits, since one record more would otherwise change the share of all.

    With "permutation" exactly `count` records are held out, as before this was an option. Which ones, their number
    decides: one record more moves most of them. Epsilon then holds for a record of the training set alone.

    Args:
        split: Kind of split.
        identities: Content of each record, in the order of the data; equal records go the same way.
        records: Number of records.
        count: Number of records to hold out.
    """
    if split == "permutation":
        order = np.random.default_rng(_PERMUTATION_SEED).permutation(records)
        return np.sort(order[:count]), np.sort(order[count:])
    return parted_by_hash(identities(), count / _in_two_digits(records))


def parted_by_hash(identities: Iterable[bytes], share: float) -> tuple[Positions, Positions]:
    """Positions of the records that a keyed hash holds out, and of the others, both ascending.

    Args:
        identities: Content of each record.
        share: Probability of a record to be held out, over all keys.
    """
    held_out = _below(share, (_hash(identity, _KEY) for identity in identities))
    return np.flatnonzero(held_out), np.flatnonzero(~held_out)


def membership_coins(identities: Iterable[bytes], seed: int) -> NDArray[np.bool_]:
    """A fair coin for each record: whether it is a member of the training data of the run with a seed.

    The coin is a keyed hash of the record's content, so that coins are independent of each other and of those of other
    seeds, and none depends on which other records there are. Copies of a record have coins of their own, by their
    number: with one coin they would be members together, and epsilon and its tests hold for one record alone.

    Args:
        identities: Content of each record.
        seed: Seed of the run, which determines the coins.

    Returns:
        (N,), True for members.
    """
    key = _MEMBERSHIP_KEY + str(seed).encode()
    return _below(0.5, _of_copies((_hash(identity, key) for identity in identities), key))


def _of_copies(hashes: Iterable[int], key: bytes) -> Iterator[int]:
    """The first of several equal hashes, and for each further one a hash of it and of its number."""
    copies: Counter[int] = Counter()
    for value in hashes:
        number = copies[value]
        copies[value] += 1
        yield value if number == 0 else _hash(b"copy %d of %d" % (number, value), key)


def _below(share: float, hashes: Iterable[int]) -> NDArray[np.bool_]:
    """Mask of the hashes that lie in the lowest part of all hashes, of a given share."""
    threshold = share * 2**_BITS
    return np.fromiter((value < threshold for value in hashes), dtype=bool)


def _hash(identity: bytes, key: bytes) -> int:
    return int.from_bytes(blake2b(identity, digest_size=_BITS // 8, key=key).digest(), "big")


def _in_two_digits(number: int) -> int:
    """A number of records, rounded so that one record more rarely changes it: 1437 is 1400, and 57 is 60.

    >>> [_in_two_digits(number) for number in (3, 57, 539, 1437, 60_000)]
    [3, 60, 540, 1400, 60000]
    """
    return number if number < 10 else round(number, min(-1, 2 - len(str(number))))


def name_bytes(name: Hashable) -> bytes:
    """Identity of a user: the name, the same whether a file gives it as a number or as a text."""
    return str(name).encode("utf-8", "surrogatepass")


def image_bytes(pixels: Tensor, labels: Tensor) -> Iterable[bytes]:
    """Identity of each of some labeled images: pixels and label, as in the file.

    Args:
        pixels: (N, ...), uint8 or float32.
        labels: (N,), int64.
    """
    rows = pixels.contiguous().reshape(len(pixels), -1).numpy()
    rows = rows.astype(rows.dtype.newbyteorder("<"), copy=False)  # the same on every machine
    for row, label in zip(rows, labels.to(torch.int64).tolist(), strict=True):
        yield row.tobytes() + label.to_bytes(8, "little", signed=True)
