"""Threads, memory and garbage collection of the program: settings that an import of the library never makes.

No import of PyTorch here: how threads wait is read when its OpenMP library is loaded.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

SPINS = "3000"
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def wait_briefly() -> None:
    """Let a thread that waits for the others sleep soon, instead of spinning for milliseconds.

    Where another process takes a core, one thread of every operator waits to be scheduled, and the others spin
    meanwhile (libgomp: for 300,000 turns): on two cores a run takes four times as long beside a busy process, and ten
    times as long beside another training. With three thousand turns, operators that follow each other closely find
    their threads awake. Results do not change: the number of threads does not. What the environment says is respected.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def warn_in_one_line() -> None:
    """Print warnings without the file and the line of ours that they come from."""
    warnings.formatwarning = lambda message, *_, **__: f"dpbench: warning: {message}\n"


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, import PyTorch and Lightning without garbage collection; later collections leave out what was imported.

    These imports make half a million objects, nearly all of which stay, and Python goes through all of them eight times
    meanwhile: a sixth of the time. Where PyTorch is loaded already nothing is done: `gc.freeze` would keep the garbage
    of whoever has loaded it.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def warn_of_spinning(threads: int) -> None:
    """Warn where threads would spin beside other work, with the remedy.

    That is where PyTorch was loaded before `wait_briefly` (a program or a launcher of one's own), or asked to spin.

    Args:
        threads: Of an operator.
    """
    if sys.platform != "linux" or threads < 2 or _waits_briefly():
        return
    cores = len(os.sched_getaffinity(0))
    busy = os.getloadavg()[0]
    if busy + threads > cores + 0.5:
        warnings.warn(
            f"other work keeps {busy:.1f} of {cores} cores busy, and {threads} threads that wait for each other spin: "
            f"this run may take ten times as long. Set GOMP_SPINCOUNT={SPINS} or OMP_NUM_THREADS=1 in the "
            "environment.",
            stacklevel=2,
        )


def _waits_briefly() -> bool:
    spins = os.environ.get("GOMP_SPINCOUNT")
    if spins is not None:
        return spins.isdecimal() and int(spins) <= 2 * int(SPINS)
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


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
