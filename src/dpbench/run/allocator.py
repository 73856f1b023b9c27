"""How the C library hands out memory: a setting of the program, never of an import of the library."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_large_blocks() -> bool:
    """Keep large blocks that were freed, instead of returning them to the system after every step.

    glibc gives each large block back when it is freed, and the system clears every page of the next one: on two cores a
    private step spends a third of its time so, a plain one less. The price is memory that stays resident
    between steps. Elsewhere than on Linux with glibc nothing happens.

    Returns:
        Whether the setting was made.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
