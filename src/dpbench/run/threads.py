"""How the threads of an operator wait for each other: a setting of the program, never of an import of the library.

No import of PyTorch here: the setting is read when its OpenMP library is loaded.
"""

from __future__ import annotations

import os
import sys
import warnings

SPINS = "3000"
_CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def wait_briefly() -> None:
    """Let a thread that waits for the others sleep soon, instead of spinning for milliseconds.

    Where another process takes a core, one thread of every operator waits to be scheduled, and the others spin
    meanwhile (libgomp: for 300,000 turns): on two cores a run takes four times as long beside a busy process, and ten
    times as long beside another training. With three thousand turns, operators that follow each other closely find
    their threads awake. Results do not change: the number of threads does not. What the environment says is respected.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _CHOSEN):
        os.environ["GOMP_SPINCOUNT"] = SPINS


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
            f"this run may take ten times as long. Set GOMP_SPINCOUNT={SPINS} or OMP_NUM_THREADS=1 in the environment.",
            stacklevel=2,
        )


def _waits_briefly() -> bool:
    spins = os.environ.get("GOMP_SPINCOUNT")
    if spins is not None:
        return spins.isdecimal() and int(spins) <= 2 * int(SPINS)
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
