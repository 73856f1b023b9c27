"""Everything of `python -m benchmarks gpu`, kept after each piece."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import rows
from benchmarks.gpu import report
from benchmarks.gpu.checks import CHECKS, checked
from benchmarks.gpu.measure import GPU_WORKLOADS, apart, batches, measure, methods_for, timed
from benchmarks.gpu.rounds import in_turn, together
from benchmarks.users.tasks import TASKS
from dpbench.files import write_atomically

PARTS = ("checks", "steps", "rounds")
AT_ONCE = (10, 50)
_RECURRENT = "char_lstm 5x4"  # cuDNN's LSTM knows no vmap
Say = Callable[[str], None]


def run(
    device: str,
    stem: Path,
    say: Say,
    parts: Sequence[str] = PARTS,
    workloads: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    users: int = 100,
    repeats: int = 5,
    turn: float = 0.2,
) -> Path:
    """Checks, steps and rounds of users; STEM.json, STEM.md and STEM.png are whole after each piece.

    Args:
        device: "cuda" or "cpu".
        stem: Of the files.
        say: Told what is being done.
        parts: What is wanted, of `PARTS`.
        workloads: Those of `GPU_WORKLOADS`; None: all.
        methods: Of the steps; None: all.
        users: In a round.
        repeats: Turns of each method.
        turn: Seconds of a turn.

    Returns:
        The page.
    """
    path = stem.with_suffix(".json")
    kept = _read(path)
    for name in CHECKS if "checks" in parts else ():
        say(f"check: {name}")
        with TemporaryDirectory() as folder:
            kept["checks"][name] = checked(name, device, Path(folder)) | rows.origin()
        _write(path, kept)
    for name in (workloads or GPU_WORKLOADS) if "steps" in parts else ():
        chosen = [m for m in methods_for(name) if methods is None or m in methods]
        for group in apart(chosen):
            say(f"{name}: {', '.join(group)}")
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:  # a fault loses the device's context
                new = alone.submit(measure, name, group, device, repeats, turn).result()
            table = rows.merged(kept["steps"], [{**row, **rows.origin()} for row in new])
            kept["steps"] = rows.with_ratios(table, dict(batches()))
            _write(path, kept)
    for name in TASKS if "rounds" in parts else ():
        say(f"round of users: {name}")
        kept["rounds"][name] = _rounds(name, users, repeats, device) | rows.origin()
        _write(path, kept)
    report.report(kept, stem)
    return stem.with_suffix(".md")


def _read(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"notes": [], "checks": {}, "steps": [], "rounds": {}}
    return empty | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def _write(path: Path, kept: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(kept, indent=1) + "\n")


def _rounds(name: str, users: int, repeats: int, device: str) -> dict[str, Any]:
    """Milliseconds of a round: one user after the other, and several at once."""
    task = TASKS[name]
    found: dict[str, Any] = {"users": users, "steps": task.steps, "rows": task.batch}
    ways: dict[str, Callable[[], list[float]]] = {"one after the other": lambda: in_turn(task, users, repeats, device)}
    for at_once in AT_ONCE if name != _RECURRENT else ():
        ways[f"{at_once} at once"] = lambda at_once=at_once: _seconds(
            together(task, users, at_once, device), repeats, device
        )  # type: ignore[misc]
    for way, seconds in ways.items():
        try:
            found[way] = 1e3 * statistics.median(seconds())
        except Exception as error:
            found[way] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return found


def _seconds(go: Callable[[], object], repeats: int, device: str) -> list[float]:
    timed(go, 1, device)
    return [timed(go, 1, device) for _ in range(repeats)]
