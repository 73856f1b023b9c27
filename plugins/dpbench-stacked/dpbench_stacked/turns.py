"""Several trainings in one process, each in a thread of its own, one at a time, until their batches meet.

Much of a process is one for all of its threads: the states of random generators, filters of warnings, handlers of logs.
So no two trainings ever run at once. A thread works while it has the turn, and hands it on where it waits for the
others (`Turns.meet`) or ends; what is process-wide is put away then, and is back when the turn is. Each training sees
the process as if it were alone in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_BETWEEN_LOOKS = 0.2
"""Seconds after which the main thread, which takes signals, looks whether all have ended."""

SaveState = Callable[[], Callable[[], None]]
"""Takes the process-wide state of a training; returns a function that restores it."""
CarryOut = Callable[[dict[int, Any]], None]
"""Answers the requests of trainings, by their slots."""

_threads = threading.local()


class Place(NamedTuple):
    """Place of a training among those of its process.

    Attributes:
        turns: Turns of the process.
        slot: Its number, from 0.
    """

    turns: Turns
    slot: int


def place() -> Place | None:
    """Place of the training in this thread; None: it is alone in its process."""
    return getattr(_threads, "place", None)


class Turns:
    """Trainings that take turns.

    Args:
        save_state: Called as a training hands on its turn.
    """

    def __init__(self, save_state: SaveState) -> None:
        self._save_state = save_state
        self._changed = threading.Condition()
        self._turn: int | None = None
        self._trainings: list[int] = []  # that have not ended
        self._requests: dict[int, Any] = {}  # without an answer so far
        self._outcomes: dict[int, Any] = {}

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run tasks to their ends; one that fails leaves the others alone.

        Signals are taken by this thread. What their handlers raise ends the waiting, and the threads with the process.

        Args:
            tasks: Trainings, as functions.

        Returns:
            Result of each, or the exception that it has raised.
        """
        restore = self._save_state()
        self._trainings = list(range(len(tasks)))
        self._turn = 0
        for slot, task in enumerate(tasks):
            thread = threading.Thread(target=self._train, args=(slot, task, restore), daemon=True, name=f"run-{slot}")
            thread.start()
        with self._changed:
            while self._trainings:
                self._changed.wait(_BETWEEN_LOOKS)
        restore()
        return [self._outcomes[slot] for slot in range(len(tasks))]

    def meet(self, slot: int, request: Any, carry_out: CarryOut) -> None:
        """Wait until each of the other trainings waits, too, or has ended; then all requests are answered at once.

        Args:
            slot: Slot of the training that has the turn.
            request: Its request.
            carry_out: Function that answers the requests of all waiting trainings; that of one of them is called.
        """
        restore = self._save_state()
        with self._changed:
            self._requests[slot] = request
            self._hand_on(slot)
            self._wait(slot)
        restore()
        if slot in self._requests:
            requests = dict(sorted(self._requests.items()))
            self._requests.clear()
            carry_out(requests)

    def _train(
        self,
        slot: int,
        task: Callable[[], Any],
        restore: Callable[[], None],
    ) -> None:
        _threads.place = Place(self, slot)
        with self._changed:
            self._wait(slot)
        restore()
        try:
            outcome = task()
        except BaseException as error:
            outcome = error
        with self._changed:
            self._outcomes[slot] = outcome
            self._trainings.remove(slot)
            self._hand_on(slot)

    def _wait(self, slot: int) -> None:
        while self._turn != slot:
            self._changed.wait()

    def _hand_on(self, slot: int) -> None:
        """Give the turn to the next training that does not wait for others; else to one that answers for all."""
        following = sorted(self._trainings, key=lambda other: (other <= slot, other))
        ready = [other for other in following if other not in self._requests]
        waiting = sorted(self._requests)
        self._turn = next(iter([*ready, *waiting]), None)
        self._changed.notify_all()
