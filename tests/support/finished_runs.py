"""Folders of runs that are finished, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def finished(folder: Path, accuracy: float | None, epsilon: float | None, **strategy: Any) -> None:
    folder.mkdir(parents=True)
    config = {"run": {"name": folder.name}, "strategy": {"_target_": "dpbench.strategies.DPSGD", **strategy}, "seed": 0}
    record = {
        "config": config,
        "metrics": {"test/accuracy": accuracy},
        "privacy": {"epsilon": {"rdp": epsilon, "pld": None}},
        "seed": 0,
        "seconds": 3.0,
        "steps": 1000,
    }
    (folder / "result.json").write_text(json.dumps(record))
