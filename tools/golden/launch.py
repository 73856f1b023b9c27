"""Trains golden runs: those of one process here, those of two by one `torchrun` for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.golden.scenarios import Scenario

Outcomes = dict[str, dict[str, Any]]
"""Name of a scenario → the fields of its `Outcome`."""
_MOST_SECONDS = 900


def with_twins(chosen: Iterable[Scenario]) -> list[Scenario]:
    """Scenarios, and what each must come to the same as."""
    every: dict[str, Scenario] = {}
    for scenario in chosen:
        one: Scenario | None = scenario
        while one is not None:
            every.setdefault(one.name, one)
            one = one.twin
    return list(every.values())


def train(chosen: Sequence[Scenario], source: Path | None = None, runner: Path | None = None) -> Outcomes:
    """Train scenarios, in processes of their own.

    Args:
        chosen: What to train.
        source: The folder that holds the package `dpbench`; None: that of this process.
        runner: The checkout whose `tools.golden` trains; None: this one.

    Raises:
        subprocess.CalledProcessError: A run failed; its error was printed.
    """
    outcomes: Outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in ("1", "2"):
            part = [one for one in chosen if one.processes == processes]
            if part:
                outcomes |= _train_part(part, processes, Path(folder) / processes, source, runner)
    return outcomes


def _train_part(
    chosen: Sequence[Scenario], processes: str, folder: Path, source: Path | None, runner: Path | None
) -> Outcomes:
    folder.mkdir()
    names = folder / "names.json"
    names.write_text(json.dumps([one.name for one in chosen]), encoding="utf-8")
    root = runner or Path(__file__).parents[2]
    path = [str(source), str(root)] if source is not None else [*sys.path, str(root)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = ["-m", "tools.golden.part", str(names), str(folder)]
    if processes == "2":
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    subprocess.run([sys.executable, *words], cwd=root, env=environment, check=True, timeout=_MOST_SECONDS)
    outcomes: Outcomes = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
    return outcomes
