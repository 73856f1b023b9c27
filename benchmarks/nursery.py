"""Workers that start at once: forked from a process that has imported what most of them need.

Ten imports of PyTorch and Lightning at a time were half of a benchmark's minutes, and memory that is shared now.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from tqdm import tqdm

from benchmarks import worker

_IMPORTED = ("benchmarks.ours", "dpbench.run.train", "hydra")


class Forked:
    """A worker in a forked process, with what is used of a `subprocess.Popen`: pipes for lines, and its end.

    Args:
        workload: Name of the workload.
        method: Name of the method.
        device: "cpu" or "cuda".
    """

    def __init__(self, workload: str, method: str, device: str) -> None:
        ours, theirs = _nursery().Pipe()
        self._process = _nursery().Process(target=_serve, args=(theirs, workload, method, device), daemon=True)
        self._process.start()
        theirs.close()
        self.stdin = os.fdopen(os.dup(ours.fileno()), "w", encoding="utf-8")
        self.stdout = os.fdopen(os.dup(ours.fileno()), "r", encoding="utf-8")
        ours.close()

    def poll(self) -> int | None:
        """Exit status, or None."""
        return self._process.exitcode

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> None:
        """Until it has ended, or so many seconds."""
        self._process.join(timeout)
        for pipe in (self.stdin, self.stdout):
            with suppress(OSError):  # of a line that a dead process did not read
                pipe.close()


@cache
def _nursery() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def _serve(pipe: Connection, *names: str) -> None:
    """Orders from the pipe instead of stdin, answers into it instead of stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for stream in (0, 1):
        os.dup2(pipe.fileno(), stream)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0, "r"), os.fdopen(1, "w"), os.fdopen(2, "w")
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed would leave behind
    worker.main(*names)
