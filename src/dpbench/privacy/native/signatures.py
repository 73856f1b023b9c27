"""Types of the kernels' arguments, as `native.cpp` has them: without, ctypes would cut a number off in silence."""

from __future__ import annotations

import ctypes

_POINTER, _WHOLE, _SINGLE, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_double

ARGUMENTS: dict[str, tuple[type, ...]] = {
    "dpbench_convolution": (*(_POINTER,) * 5, _SINGLE, _SINGLE, *(_POINTER,) * 3),
    "dpbench_weighted_sum": (*(_POINTER,) * 3, *(_WHOLE,) * 3),
    "dpbench_weighted_signs": (*(_POINTER,) * 3, *(_WHOLE,) * 3),
    "dpbench_count_outer": (*(_POINTER,) * 3, *(_WHOLE,) * 3, _SINGLE, _WHOLE),
    "dpbench_sum_outer": (*(_POINTER,) * 4, *(_WHOLE,) * 3, _SINGLE, _WHOLE),
    "dpbench_group_norm": (*(_POINTER,) * 4, *(_WHOLE,) * 4, _DOUBLE, _WHOLE),
    "dpbench_add_noise": (_POINTER, _WHOLE, _WHOLE, _SINGLE, _DOUBLE, _POINTER, _WHOLE),
    "dpbench_sum": (_POINTER, _WHOLE, _POINTER, _WHOLE),
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
