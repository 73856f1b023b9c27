"""How long a command takes before it does anything: `python -m benchmarks startup`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.machine import wait_until_quiet
from benchmarks.rows import Row
from benchmarks.timing import Say
from benchmarks.workloads import STARTUP

FIRST = "first private step of digits"
_DIGITS = ("train", "data=digits", "strategy=dpsgd", "logger=none")
_RUN = "runs/made"
COMMANDS = {
    "dpbench train --cfg job": "train --cfg job",
    "dpbench account RUN": f"account {_RUN}",
    "dpbench calibrate --epsilon 3 ...": (
        "calibrate --epsilon 3 --delta 1e-5 --population 60000 --batch-size 256 --epochs 60"
    ),
    "dpbench table RUNS": "table runs",
    "dpbench reproduce list": "reproduce list",
}
_POLL = 0.005  # seconds


def measure(repeats: int, patience: float, say: Say) -> list[Row]:
    """Measure wall and CPU milliseconds of processes, medians of turns after one run that fills the caches of files.

    Args:
        repeats: Turns.
        patience: Seconds to wait for a quiet machine.
        say: Told what is being done.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*COMMANDS, FIRST)}
    errors: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        say("making a run")
        # Where it fails, `account` and `table` do, and their rows say so.
        _time((*_DIGITS, "trainer.max_steps=10", f"hydra.run.dir={_RUN}"), Path(folder), None)
        quiet = wait_until_quiet(patience)
        for turn in range(repeats):
            say(f"turn {turn + 1}")
            for name, series in times.items():
                words: tuple[str, ...]
                if name == FIRST:
                    words = (*_DIGITS, "trainer.max_steps=1", f"hydra.run.dir=first_{turn}")
                    measured = _time(words, Path(folder), Path(folder, f"first_{turn}", "ledger.jsonl"))
                else:
                    words = tuple(COMMANDS[name].split())
                    measured = _time(words, Path(folder), None)
                if isinstance(measured, int):
                    errors[name] = f"dpbench {' '.join(words)}: exit status {measured}"
                else:
                    series.append(measured)
    return [_row(name, times[name], errors.get(name), quiet) for name in times]


def _time(words: tuple[str, ...], folder: Path, ledger: Path | None) -> tuple[float, float] | int:
    """Wall and CPU seconds of `dpbench WORDS`, to its end or to the first release in a ledger; or its exit status."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "dpbench", *words],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    released = False
    ended = 0
    while not ended and not released:
        time.sleep(_POLL)
        # For its usage, which `Popen.poll` would throw away.
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        # A line after the header, which is written before the noised sum is used.
        released = ledger is not None and ledger.exists() and ledger.read_bytes().count(b"\n") > 1
    wall = time.perf_counter() - start
    if not ended:
        process.kill()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not released and (process.returncode or ledger is not None):
        return process.returncode
    return wall, usage.ru_utime + usage.ru_stime


def _row(name: str, times: list[tuple[float, float]], error: str | None, quiet: bool) -> Row:
    # Of other turns: they are not what the command takes when it works.
    walls = [] if error else [1e3 * wall for wall, _ in times]
    cpus = [] if error else [1e3 * cpu for _, cpu in times]
    return {
        "workload": STARTUP,
        "method": name,
        "device": "cpu",
        "threads": None,
        "wall_ms": statistics.median(walls) if walls else None,
        "wall_ms_range": [min(walls), max(walls)] if walls else None,
        "cpu_ms": statistics.median(cpus) if cpus else None,
        "peak_mb": None,
        "quiet": quiet,
        "error": error,
        "reference_wall_ms": None,
        "reference_cpu_ms": None,
    }
