"""Signals that end a training: from people, and from schedulers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dpbench.errors import Interrupted
from dpbench.harness.runs.folder import RunFolder

_FROM_PEOPLE = (signal.SIGINT, signal.SIGTERM)
_FROM_SCHEDULERS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Slurm's --signal, submitit's notice of a preemption; Windows has none."""
_BETWEEN_LOOKS = 0.2  # seconds
_ECHO = 1.0  # seconds in which a signal may come twice though it was sent once
_of_threads: dict[int, Any] = {}
"""Handlers of threads that are not the main one, by thread."""
_relayed: list[int] = []
"""Signals that were handed on to them."""
SIGNALS = (*_FROM_PEOPLE, *_FROM_SCHEDULERS)


class SweepInterrupted(BaseException):
    """Ends a whole sweep: Hydra takes an ordinary exception for the end of one job and starts the next."""

    def __init__(self, error: Interrupted) -> None:
        super().__init__(str(error))
        self.error = error


class StopSignals:
    """Requests to a training by signals.

    Attributes:
        number: Number of the first signal that asked to stop after the step at hand, or 0.
        save_requested: True after a signal that stops nothing, but asks for everything to be saved.
    """

    def __init__(self) -> None:
        self.number = 0
        self.save_requested = False
        self._time = 0.0

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: It is the second signal from a user, who does not want to wait.
        """
        if stops_nothing(number):
            self.save_requested = True
            return
        # torchrun hands a Ctrl-C on to processes to which the terminal has given it already.
        is_echo = "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() < self._time + _ECHO
        if self.number in _FROM_PEOPLE and number in _FROM_PEOPLE:
            if is_echo:
                return
            raise KeyboardInterrupt
        if self.number and number in _FROM_PEOPLE:
            return  # the end that a scheduler has given notice of
        self.number = number
        self._time = time.monotonic()


def interrupted_at_once(number: int, folder: RunFolder) -> Interrupted:
    """The error after a second Ctrl-C, for which nothing more was saved."""
    files = "The last checkpoint and the ledger are kept" if folder.checkpoint.exists() else "The ledger is kept"
    return Interrupted(number, folder.command("resume"), files)


def stops_nothing(number: int) -> bool:
    """Tell whether a signal does not end this job: submitit's get a SIGTERM together with the notice of a preemption.

    One that ends there by a SIGTERM is over for submitit, though Slurm starts it again.
    """
    return "SUBMITIT_EXECUTOR" in os.environ and number == signal.SIGTERM


def hand_back(error: Interrupted) -> None:
    """Let submitit put the job into the queue again, which ends this process: everything is saved.

    Its own handler would do so in the middle of a step.
    """
    handler = signal.getsignal(error.number)
    if "SUBMITIT_EXECUTOR" in os.environ and error.number in _FROM_SCHEDULERS and callable(handler):
        handler(error.number, None)


@contextmanager
def handled_by(handler: Any) -> Iterator[dict[int, Any]]:
    """Inside, signals go to a handler; outside of the main thread Python allows none, and nothing changes.

    Where the main thread hands signals on (`relayed_to_threads`), a handler of another thread gets them, too.

    Yields:
        The handlers before, by number; none outside of the main thread.
    """
    before: dict[int, Any] = {}
    thread = threading.get_ident()
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in SIGNALS}
    else:
        _of_threads[thread] = handler
        if _relayed:  # a training that begins after the signal stops, too
            handler(_relayed[0], None)
    try:
        yield before
    finally:
        _of_threads.pop(thread, None)
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def relayed_to_threads() -> Iterator[None]:
    """Inside, the main thread hands signals on to handlers of other threads."""

    def relay(number: int, frame: FrameType | None) -> None:
        if not _of_threads and not stops_nothing(number):
            raise KeyboardInterrupt
        _relayed.append(number)
        for handler in list(_of_threads.values()):
            handler(number, frame)

    _relayed.clear()
    with handled_by(relay):
        try:
            yield
        finally:
            _relayed.clear()


def end_with(parent: int, number: int) -> None:
    """Send this process a signal when its parent is gone: it would train on unnoticed.

    Args:
        parent: Its id.
        number: The signal. One that is asked to save may not begin another job of its sweep, and ends at once.
    """
    if os.getppid() != parent:
        os._exit(128 + number)
    name = f"dpbench-end-{parent}"

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(_BETWEEN_LOOKS)
        os.kill(os.getpid(), number)

    # A worker of a sweep comes here with each of its jobs.
    if name not in [thread.name for thread in threading.enumerate()]:
        threading.Thread(target=follow, daemon=True, name=name).start()
