"""Threads and memory of the program: settings that an import of the library never makes.

No import of PyTorch here: how threads wait is read when its OpenMP library is loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

SPINS = "3000"
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def wait_briefly() -> None:
    """Let a thread that waits for the others sleep soon, instead of spinning for milliseconds.

    Where another process takes a core, one thread of every operator waits to be scheduled, and the others spin
    meanwhile (libgomp: for 300,000 turns): on two cores a run takes four times as long next to a busy process, and ten
    times as long next to another training. With three thousand turns, operators that follow each other closely find
    their threads awake. Results do not change: the number of threads does not. Values that are set already stay.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def warn_in_one_line() -> None:
    """Print warnings without the file and the line of ours that they come from."""
    warnings.formatwarning = lambda message, *_, **__: f"dpbench: warning: {message}\n"


def keep_large_blocks() -> bool:
    """Keep large blocks of memory that were freed, instead of returning them to the system after every step.

    glibc gives each large block back when it is freed, and the system clears every page of the next one: on two cores a
    private step spends a third of its time so, a plain one less. The price is memory that stays resident
    between steps. Elsewhere than on Linux with glibc nothing happens.

    Returns:
        Whether the setting was made.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
