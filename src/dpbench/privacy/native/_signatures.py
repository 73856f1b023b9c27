"""Types of the kernels' arguments, as `native.cpp` has them: without, ctypes would cut a number off in silence."""

from __future__ import annotations

import ctypes

_POINTER = ctypes.c_void_p
_WHOLE = ctypes.c_int64
_SINGLE = ctypes.c_float
_DOUBLE = ctypes.c_double

_WEIGHTED_SUM: tuple[type, ...] = (
    _POINTER,  # rows
    _POINTER,  # weights
    _POINTER,  # total
    _WHOLE,  # records
    _WHOLE,  # coordinates
    _WHOLE,  # threads
)

ARGUMENTS: dict[str, tuple[type, ...]] = {
    "dpbench_convolution": (
        _POINTER,  # geometry
        _POINTER,  # inputs
        _POINTER,  # gradients of outputs
        _POINTER,  # order of rows
        _POINTER,  # starts of records
        _SINGLE,  # factor
        _SINGLE,  # threshold
        _POINTER,  # weights
        _POINTER,  # squared norms
        _POINTER,  # bias
    ),
    "dpbench_weighted_sum": _WEIGHTED_SUM,
    "dpbench_weighted_signs": _WEIGHTED_SUM,
    "dpbench_count_outer": (
        _POINTER,  # gradients of outputs
        _POINTER,  # inputs
        _POINTER,  # counts
        _WHOLE,  # records
        _WHOLE,  # outputs
        _WHOLE,  # inputs
        _SINGLE,  # threshold
        _WHOLE,  # threads
    ),
    "dpbench_sum_outer": (
        _POINTER,  # gradients of outputs
        _POINTER,  # inputs
        _POINTER,  # weights
        _POINTER,  # total
        _WHOLE,  # records
        _WHOLE,  # outputs
        _WHOLE,  # inputs
        _SINGLE,  # threshold
        _WHOLE,  # threads
    ),
    "dpbench_group_norm": (
        _POINTER,  # inputs
        _POINTER,  # gradients of outputs
        _POINTER,  # scale
        _POINTER,  # shift
        _WHOLE,  # records
        _WHOLE,  # pixels
        _WHOLE,  # channels
        _WHOLE,  # groups
        _DOUBLE,  # epsilon
        _WHOLE,  # threads
    ),
    "dpbench_add_noise": (
        _POINTER,  # total
        _WHOLE,  # start in the stream
        _WHOLE,  # coordinates
        _SINGLE,  # scale
        _DOUBLE,  # spacing
        _POINTER,  # key
        _WHOLE,  # threads
    ),
    "dpbench_sum": (
        _POINTER,  # numbers
        _WHOLE,  # how many
        _POINTER,  # total
        _WHOLE,  # threads
    ),
}


def declare(library: ctypes.CDLL) -> None:
    """State the types of all kernels of a library.

    Raises:
        AttributeError: It lacks one.
    """
    for name, types in ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = None
