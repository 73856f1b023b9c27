"""Processes that are measured."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import worker

_ROOT = Path(__file__).parents[1]
_PRELOADED = ("benchmarks.ours", "dpbench.harness.run.train", "hydra")
_PATIENCE = 30.0  # seconds for a process to end by itself


class Worker:
    """A process that obeys orders (`benchmarks.orders`).

    It is forked from one that has imported what most of them need: ten imports of PyTorch and Lightning at a time were
    half of a benchmark's minutes, and memory that is shared now.

    Args:
        words: What it does, for `benchmarks.worker`.
        environment: Variables; with them it is no fork, since libraries read some of them when they are loaded.
        python: The interpreter of another environment; no fork either.

    Attributes:
        facts: What it said of itself when it was ready.
        error: Why it measures nothing any more.
    """

    def __init__(
        self, words: tuple[str, ...], environment: Mapping[str, str] | None = None, python: Path | None = None
    ) -> None:
        self.error: str | None = None
        self._process: Any
        self._pipe, theirs = multiprocessing.Pipe()
        if environment is None:
            self._process = _forkserver().Process(target=_serve, args=(theirs, words), daemon=True)
            self._process.start()
        else:
            self._process = subprocess.Popen(
                [str(python or sys.executable), "-m", "benchmarks.worker", str(theirs.fileno()), *words],
                env={**os.environ, **environment},
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],  # answers go here, so that whatever libraries print is no answer
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        # Else the end of the process would not end the pipe, and `ask` would wait for ever.
        theirs.close()
        self.facts = self.ask()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send an order and wait for the answer; without one, wait only."""
        try:
            if order:
                self._pipe.send(order)
            answer: dict[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            answer = {"error": f"the process ended ({self._status()})"}
            self.error = answer["error"]
        return answer

    def _status(self) -> int | None:
        status: int | None = getattr(self._process, "exitcode", None) or getattr(self._process, "returncode", None)
        return status

    def close(self) -> None:
        """Let it end by itself, so that processes of its own (Ray's) end with it; kill it if it does not."""
        self._pipe.close()
        if isinstance(self._process, subprocess.Popen):
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        else:
            self._process.kill()
            self._process.join()


@cache
def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Those of transformers take seconds, and are there if they are needed.
    networks = [name for name in ("benchmarks.networks",) if name in sys.modules]
    context.set_forkserver_preload([*_PRELOADED, *networks])
    return context


def _serve(pipe: Connection, words: tuple[str, ...]) -> None:
    """A forked worker: what libraries print goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  as long as the process
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a process that is killed would leave behind
    worker.main(pipe, words)
