"""How far all runs of a sweep or a table are, together: a bar over their steps, or a line for each run that ends."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm
from yaml import YAMLError

from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import steps_logged
from dpbench.runs.sweep import Sweep

_REFRESH = 1.0  # seconds
_SHARE = 50  # to look takes a fiftieth of the time at most: runs may train in this very process
_BAR = "{desc} {bar:20} {percentage:3.0f}% [{elapsed}, left {remaining}]"
_ENDED = ("done", "failed")


@dataclass(frozen=True)
class Progress:
    """What there is of some runs at a moment.

    Attributes:
        states: Of each run, by what it is called; "done" and "failed" are told.
        counts: The same in short.
        made: Steps that all of them have made.
        steps: That all of them will make.
        alone: Whether no run draws a bar of its own in this terminal.
    """

    states: Mapping[str, str]
    counts: str
    made: int
    steps: int
    alone: bool = True


@contextmanager
def watching(look: Callable[[], Progress | None]) -> Iterator[None]:
    """Show in a thread how far the runs are that are made meanwhile.

    Args:
        look: What there is now; None: nothing yet.
    """
    display = _Display(look, sys.stderr.isatty())
    display.show()  # what was there before is not told
    stop = threading.Event()

    def watch() -> None:
        pause = _REFRESH
        while not stop.wait(pause):
            begun = time.perf_counter()
            display.show()
            pause = max(_REFRESH, _SHARE * (time.perf_counter() - begun))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        display.show()
        display.close()


class _Display:
    def __init__(self, look: Callable[[], Progress | None], drawn: bool) -> None:
        self._look, self._drawn = look, drawn
        self._begun: tuple[float, int] | None = None  # when, and at which step
        self._told: dict[str, str] | None = None  # before the first look
        self._bar: tqdm[Any] | None = None

    def show(self) -> None:
        now = self._look()
        if self._told is None:  # a run that ends between two looks, the first of which found nothing yet, is told
            self._told = dict(now.states) if now is not None else {}
        if now is None:
            return
        if self._begun is None:
            self._begun = time.monotonic(), now.made
        if self._drawn and now.alone:
            self._draw(now)
        else:
            self._tell(now)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _draw(self, now: Progress) -> None:
        if self._bar is None:
            width = max(shutil.get_terminal_size((100, 24)).columns, 80)
            self._bar = tqdm(initial=now.made, bar_format=_BAR, ncols=width)
        self._bar.total = now.steps
        self._bar.set_description_str(now.counts, refresh=False)
        self._bar.update(now.made - self._bar.n)
        self._bar.refresh()

    def _tell(self, now: Progress) -> None:
        told = self._told or {}
        for name, state in now.states.items():
            if state in _ENDED and state != told.get(name):
                # tqdm's, because it leaves a bar that a run draws in one piece
                tqdm.write(f"{now.counts}: {name} is {state}{self._left(now)}", file=sys.stderr)
        self._told = dict(now.states)

    def _left(self, now: Progress) -> str:
        assert self._begun is not None
        seconds, made = time.monotonic() - self._begun[0], now.made - self._begun[1]
        if made <= 0 or now.steps <= now.made or seconds < _REFRESH:
            return ""
        return f", left {timedelta(seconds=round(seconds * (now.steps - now.made) / made))}"


class SweepProgress:
    """What there is of the runs of `dpbench train -m`, by what they have written below the sweep's folder.

    Args:
        sweep: The sweep, once there is one.
        jobs: How many runs it makes.
    """

    def __init__(self, sweep: Callable[[], Sweep | None], jobs: int) -> None:
        self._sweep, self._jobs = sweep, jobs
        self._steps: dict[Path, int] = {}

    def __call__(self) -> Progress | None:
        """What there is now; None before the sweep has begun."""
        sweep = self._sweep()
        if sweep is None:
            return None
        places = {path.parent for path in sweep.folder.rglob(RunFolder.lock)} - sweep.before
        runs = [run for run in map(RunFolder, sorted(places)) if run.begun]
        states = {str(run): "done" if run.finished else "begun" for run in runs}
        planned = [self._planned(run) for run in runs]
        pairs = zip(runs, planned, strict=True)
        made = sum(most if run.finished else min(steps_logged(run.metrics), most) for run, most in pairs)
        usual = sum(planned) / len(planned) if planned else 1  # of those that have not begun
        counts = Counter(states.values())
        told = f"{counts['done']}/{self._jobs} done, {counts['begun']} begun"
        steps = sum(planned) + usual * max(0, self._jobs - len(runs))
        return Progress(states, told, made, round(steps), sweep.apart)

    def _planned(self, run: RunFolder) -> int:
        """Steps of a run, by its configuration; 1 where epochs or a time end it."""
        if run.path not in self._steps:
            with suppress(OSError, YAMLError, KeyError, TypeError):
                asked = yaml.safe_load(run.config.read_text(encoding="utf-8"))["trainer"]["max_steps"]
                self._steps[run.path] = asked if isinstance(asked, int) and asked > 0 else 1
        return self._steps.get(run.path, 1)
