"""Tests of the kernels before they are used: a compiler can be wrong, and missing noise shows nowhere."""

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
    """Name a wrong result of the kernels; None if all are right.

    Args:
        library: The library, with the types of its arguments.
    """
    checks = {
        "noise": _noise,
        "sums": _sums,
        "gradients of a convolution": _convolution,
    }
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
    units = np.rint(numbers / SPACING).astype("<i2")
    return hashlib.sha256(units.tobytes()).hexdigest()


def _whole_numbers(shape: tuple[int, ...], modulus: int) -> NDArray[np.float32]:
    """Small whole numbers around zero in a shape: their sums and products are exact in every order."""
    numbers = np.arange(np.prod(shape), dtype=np.float32) % modulus - modulus // 2
    return numbers.reshape(shape)


def _sums(library: ctypes.CDLL) -> bool:
    rows = _whole_numbers((3, 600), 17)
    weights = np.array([2, -3, 5], np.float32)
    weighted = np.zeros(600, np.float32)
    library.dpbench_weighted_sum(_at(rows), _at(weights), _at(weighted), 3, 600, 1)
    return bool((weighted == weights @ rows).all())


def _convolution(library: ctypes.CDLL) -> bool:
    records = 2
    size = 4
    inputs = 3
    outputs = 5
    kernel = 3
    a = _whole_numbers((records, size, size, inputs), 7)
    g = _whole_numbers((records, size, size, outputs), 5)
    weights = np.zeros((records, kernel, kernel, inputs, outputs), np.float32)
    norms = np.zeros(records, np.float32)
    bias = np.zeros((records, outputs), np.float32)
    order = np.arange(records, dtype=np.int64)
    starts = np.arange(records + 1, dtype=np.int64)
    geometry = (ctypes.c_int64 * 18)(
        records,
        *(size, size, inputs),
        *(size, size, outputs),
        *(kernel, kernel),
        *(1, 1),  # stride
        *(1, 1),  # padding
        *(1, 1),  # dilation
        *(0, 0),  # channels last
        1,  # thread
    )
    library.dpbench_convolution(
        geometry,
        _at(a),
        _at(g),
        _at(order),
        _at(starts),
        1.0,
        -1.0,
        _at(weights),
        _at(norms),
        _at(bias),
    )
    padded = np.pad(a, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
    expected = np.einsum("ryxihw,rhwo->ryxio", windows, g)
    is_right = (weights == expected).all() and (bias == g.sum((1, 2))).all()
    return bool(is_right) and np.allclose(norms, np.square(weights).sum((1, 2, 3, 4)), rtol=1e-5)
