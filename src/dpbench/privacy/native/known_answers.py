"""What kernels must compute before they are used: a compiler can be wrong, and noise that is missing shows nowhere."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY = bytes(range(32))
START = 7_515_567_872
"""First of 256 numbers of the stream, with a radius of 6.7, and none close to an edge of the grid."""
SPACING = 2.0**-8
DIGEST = "f03fac7294fe8adee81cea4d61a7032bedc25a028b90b52c705bee9c2d97fcd3"
"""Of the numbers in units of the grid, two bytes each."""


def wrong_answers(library: ctypes.CDLL) -> str | None:
    """Name what the kernels compute wrongly; None where they are right.

    Args:
        library: With the types of its arguments.
    """
    checks = {"noise": _noise, "sums": _sums, "gradients of a convolution": _convolution}
    wrong = [name for name, is_right in checks.items() if not is_right(library)]
    return " and ".join(wrong) or None


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _noise(library: ctypes.CDLL) -> bool:
    total = np.zeros(256, np.float32)
    words = (ctypes.c_uint32 * 8).from_buffer_copy(KEY)
    library.dpbench_add_noise(_at(total), START, total.size, 1 / SPACING, SPACING, words, 1)
    return digest_of_numbers(total) == DIGEST


def digest_of_numbers(numbers: NDArray[Any]) -> str:
    """Hash of numbers on the grid."""
    return hashlib.sha256(np.rint(numbers / SPACING).astype("<i2").tobytes()).hexdigest()


def _sums(library: ctypes.CDLL) -> bool:
    rows = (np.arange(3 * 600, dtype=np.float32) % 17 - 8).reshape(3, 600)  # exact in every order
    weights = np.array([2, -3, 5], np.float32)
    total = np.zeros(600, np.float32)
    library.dpbench_weighted_sum(_at(rows), _at(weights), _at(total), 3, 600, 1)
    whole = np.zeros(1)
    library.dpbench_sum(_at(rows), rows.size, _at(whole), 1)
    return bool((total == weights @ rows).all()) and whole[0] == rows.sum()


def _convolution(library: ctypes.CDLL) -> bool:
    records, size, inputs, outputs, kernel = 2, 4, 3, 5, 3
    a = (np.arange(records * size * size * inputs, dtype=np.float32) % 7 - 3).reshape(records, size, size, inputs)
    g = (np.arange(records * size * size * outputs, dtype=np.float32) % 5 - 2).reshape(records, size, size, outputs)
    weights = np.zeros((records, kernel, kernel, inputs, outputs), np.float32)
    norms, bias = np.zeros(records, np.float32), np.zeros((records, outputs), np.float32)
    order, starts = np.arange(records, dtype=np.int64), np.arange(records + 1, dtype=np.int64)
    shape = (size, size, inputs, size, size, outputs, kernel, kernel, 1, 1, 1, 1, 1, 1)
    geometry = (ctypes.c_int64 * 18)(records, *shape, 0, 0, 1)
    library.dpbench_convolution(
        geometry, _at(a), _at(g), _at(order), _at(starts), 1.0, -1.0, _at(weights), _at(norms), _at(bias)
    )
    padded = np.pad(a, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for y in range(kernel):
        for x in range(kernel):
            wanted = np.einsum("rhwi,rhwo->rio", padded[:, y : y + size, x : x + size], g)
            if not (weights[:, y, x] == wanted).all():
                return False
    right_norms = np.allclose(norms, np.square(weights).sum((1, 2, 3, 4)), rtol=1e-5)
    return right_norms and bool((bias == g.sum((1, 2))).all())
