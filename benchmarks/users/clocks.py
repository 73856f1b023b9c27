"""Clocks of a round and the protocol of the processes that make them. Needs the standard library only.

A process reads orders as lines of JSON, {"method": name}, makes one round, and answers {"cpu": seconds, "wall":
seconds}. Its first line is {"ready": true} with what it has to say of itself, or an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO


class Rounds:
    """Takes orders for rounds and times them.

    Args:
        answers: Where answers go.
        cpu: CPU seconds so far.

    Attributes:
        own: Rounds that are a function, by how the name of their method begins; every other one is the round of the
            loop that calls `serve`.
        facts: Said when the process is ready.
    """

    def __init__(self, answers: TextIO, cpu: Callable[[], float] = time.process_time) -> None:
        self._answers, self._cpu, self._open = answers, cpu, False
        self.own: dict[str, Callable[[], object]] = {}
        self.facts: dict[str, Any] = {}

    def say(self, **answer: Any) -> None:
        """One line to whoever measures."""
        print(json.dumps(answer), file=self._answers, flush=True)

    def ready(self) -> None:
        """Say that the first round may be ordered, and wait for it."""
        self.say(ready=True, **self.facts)
        self.serve()

    def serve(self) -> None:
        """End the loop's round, answer, make rounds that are ordered, and return when the next one is the loop's own.

        Ends the process when there are no more orders.
        """
        self._stop()
        for line in sys.stdin:
            method = json.loads(line)["method"]
            go = next((go for name, go in self.own.items() if method.startswith(name)), None)
            self._begin()
            if go is None:
                return
            go()
            self._stop()
        os._exit(0)  # in the middle of a trainer's loop, too

    def _begin(self) -> None:
        self._open, self._start = True, (time.perf_counter(), self._cpu())

    def _stop(self) -> None:
        if self._open:
            wall, cpu = time.perf_counter() - self._start[0], self._cpu() - self._start[1]
            self._open = False
            self.say(cpu=cpu, wall=wall)


def cpu_of_tree() -> float:
    """CPU seconds of this process and of all below it, those that have ended included; from /proc, in 10 ms."""
    tick, parents, times = os.sysconf("SC_CLK_TCK"), dict[int, int](), dict[int, int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(folder.name)], times[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    return sum(ticks for number, ticks in times.items() if _below(number, os.getpid(), parents)) / tick


def _below(number: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while number != ancestor and number in parents:
        number = parents[number]
    return number == ancestor
