"""Signals that end a training: from people, and from schedulers."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from dpbench.errors import Interrupted

_FROM_PEOPLE = (signal.SIGINT, signal.SIGTERM)
_FROM_SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal, submitit's notice of a preemption
_BETWEEN_LOOKS = 1.0  # seconds
SIGNALS = (*_FROM_PEOPLE, *_FROM_SCHEDULERS)


class StopSignals:
    """What signals have asked of a training so far.

    Attributes:
        number: Of the first that asked to stop after the step at hand, or 0.
        save_requested: Whether one that stops nothing has come, and all had better be saved.
    """

    def __init__(self) -> None:
        self.number = 0
        self.save_requested = False

    def hear(self, number: int, frame: FrameType | None = None) -> None:
        """Take a signal.

        Raises:
            KeyboardInterrupt: It is the second one of people, who do not want to wait.
        """
        if _stops_nothing(number):
            self.save_requested = True
            return
        if self.number in _FROM_PEOPLE and number in _FROM_PEOPLE:
            raise KeyboardInterrupt
        if self.number and number in _FROM_PEOPLE:
            return  # the end that a scheduler has given notice of
        self.number = number


def _stops_nothing(number: int) -> bool:
    """Whether a signal does not end this job: submitit's get a SIGTERM together with the notice of a preemption.

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


def stop_with(parent: int) -> None:
    """Have a worker of joblib save and stop when the process that made it is gone: it would train on, unwatched.

    Args:
        parent: Its id.
    """
    if os.getppid() != parent:  # and the next job of the sweep was in the worker's queue
        os._exit(128 + signal.SIGTERM)
    name = "dpbench-sweep"

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(_BETWEEN_LOOKS)
        os.kill(os.getpid(), signal.SIGTERM)

    if name not in [thread.name for thread in threading.enumerate()]:
        threading.Thread(target=follow, daemon=True, name=name).start()
