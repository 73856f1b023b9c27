"""How long a command takes before it does anything: `python -m benchmarks startup`."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measure import wait_until_quiet
from benchmarks.rows import Row

STARTUP = "start-up"
FIRST = "first private step of digits"
_DIGITS = ("train", "data=digits", "strategy=dpsgd", "logger=none")
_RUNS, _RUN = "runs", "runs/made"
_CALIBRATE = "calibrate --epsilon 3 --delta 1e-5 --population 60000 --batch-size 256 --epochs 60"
COMMANDS = {
    "dpbench train --cfg job": ("train", "--cfg", "job"),
    "dpbench account RUN": ("account", _RUN),
    "dpbench calibrate --epsilon 3 ...": tuple(_CALIBRATE.split()),
    "dpbench table RUNS": ("table", _RUNS),
    "dpbench reproduce list": ("reproduce", "list"),
}
_POLL = 0.005  # seconds


def measure_startup(repeats: int, patience: float, report: Callable[[str], None]) -> list[Row]:
    """Wall and CPU milliseconds of processes, medians of turns after one run that fills the caches of files.

    Args:
        repeats: Turns.
        patience: Seconds to wait for a quiet machine.
        report: Told what is being done.
    """
    kinds: dict[str, tuple[str, ...]] = {**COMMANDS, FIRST: (*_DIGITS, "trainer.max_steps=1")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    errors: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        report("making a run")
        with suppress(subprocess.CalledProcessError):  # then `account` and `table` say so
            _timed((*_DIGITS, "trainer.max_steps=10", f"hydra.run.dir={_RUN}"), Path(folder), until=None)
        quiet = wait_until_quiet(patience)
        for turn in range(repeats):
            report(f"turn {turn + 1}")
            for name, words in kinds.items():
                run, first = Path(folder, f"first_{turn}"), name == FIRST
                own = (*words, f"hydra.run.dir={run}") if first else words
                try:
                    times[name].append(_timed(own, Path(folder), run / "ledger.jsonl" if first else None))
                except subprocess.CalledProcessError as error:
                    errors[name] = f"dpbench {' '.join(own)}: exit status {error.returncode}"
    return [_row(name, times[name], errors.get(name), quiet) for name in kinds]


def _timed(words: tuple[str, ...], folder: Path, until: Path | None) -> tuple[float, float]:
    """Wall and CPU seconds of `dpbench WORDS`, to its end or to the first release in a ledger."""
    before, start = _cpu_of_children(), time.perf_counter()
    command, nowhere = [sys.executable, "-m", "dpbench", *words], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=folder, stdout=nowhere, stderr=nowhere) as process:
        while process.poll() is None and not (until and _released(until)):
            time.sleep(_POLL)
        wall, status = time.perf_counter() - start, process.poll()
        process.kill()
    if status or (until and not _released(until)):
        raise subprocess.CalledProcessError(process.returncode, "dpbench")
    return wall, _cpu_of_children() - before


def _released(ledger: Path) -> bool:
    """Whether there is a line after the header; it is written before the noised sum is used."""
    return ledger.exists() and ledger.read_bytes().count(b"\n") > 1


def _cpu_of_children() -> float:
    """Of all that have ended: of one, since they run one after the other."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _row(name: str, times: list[tuple[float, float]], error: str | None, quiet: bool) -> Row:
    times = [] if error else times  # of other turns: they are not what the command takes when it works
    walls, cpus = ([1e3 * seconds for seconds in kind] for kind in zip(*times, strict=True)) if times else ([], [])
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
