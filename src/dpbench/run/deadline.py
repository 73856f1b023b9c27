"""The time that a run may take: it stops by itself, with a checkpoint, before somebody ends it."""

from __future__ import annotations

import os
import re
import time

from dpbench.errors import ConfigurationError

_UNITS = (86400, 3600, 60, 1)
_WITH_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_OF_SLURM = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
_LONGEST = 10**9  # seconds
_BEFORE_A_KILL = 30.0  # seconds: for what comes after the last checkpoint


def seconds_of(duration: str) -> float:
    """Seconds of a duration: 45m, 2h30m, 1d12h, or Slurm's [days-]hours:minutes:seconds.

    Raises:
        ValueError: It is no duration, or none that is positive.
    """
    found = _WITH_UNITS.fullmatch(duration) or _OF_SLURM.fullmatch(duration)
    seconds = sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS, strict=True)) if found else 0
    if not 0 < seconds < _LONGEST:
        raise ValueError(duration)
    return float(seconds)


class Deadline:
    """When a training must have ended; step by step it learns how long the next step and a checkpoint may take.

    Args:
        end: On the clock of `time.monotonic`; None for no end.
        limit: What set it, such as `run.max_time=1h`, and how it can be changed.
    """

    def __init__(self, end: float | None = None, limit: str = "") -> None:
        self._end, self._limit = end, limit
        self._since = 0.0
        self._step = self._save = 0.0  # the longest of them

    def begin(self) -> None:
        """Before the first step.

        Raises:
            ConfigurationError: The time is over already: a run that makes no step in its time would never end.
        """
        self._since = time.monotonic()
        if self._end is not None and self._since >= self._end:
            raise ConfigurationError(f"{self._limit} was over before the first step: give the run more time.")

    def step_made(self) -> bool:
        """After a step: whether another one and its checkpoint may come too late."""
        now = time.monotonic()
        self._step = max(self._step, now - self._since)
        self._since = now
        return self._end is not None and now + self._step + self._save >= self._end

    def saved(self, seconds: float) -> None:
        """After a checkpoint, which is no part of a step."""
        self._save = max(self._save, seconds)
        self._since = time.monotonic()


def deadline_of(max_time: str | None, start: float) -> Deadline:
    """The end of `run.max_time`, or of the Slurm job that this process is of, whichever comes first.

    Args:
        max_time: Of the configuration.
        start: Of the run, on the clock of `time.monotonic`.
    """
    limits = [(start + seconds_of(max_time), f"run.max_time={max_time}")] if max_time is not None else []
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and int(end):
        left = int(end) - time.time() - _BEFORE_A_KILL
        limits.append((time.monotonic() + left, "the time that Slurm gives this job"))
    return Deadline(*min(limits)) if limits else Deadline()
