"""Small runs in this process or in two, from their configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from dpbench.harness.run.build import plain
from dpbench.harness.run.search_path import conf_dir

TINY = [
    "model=mlp",
    "model.hidden=[8]",
    "data.image_size=8",
    "logger=none",
    "strategy.delta=1e-4",
    "trainer.max_steps=8",
    "trainer.log_every_n_steps=3",
    "run.checkpoint_every_n_steps=3",
    "run.name=x",
    "run.group=x",
]
TWO = ["trainer.devices=2", "+trainer.strategy=ddp_fork"]


def config_of(*words: str) -> dict[str, Any]:
    with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        return plain(compose("config", [*TINY, *words]))


def content_of(run: Path) -> tuple[bytes, Any]:
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    return (run / "ledger.jsonl").read_bytes(), metrics


def files_of(folder: Path) -> dict[str, bytes]:
    """Each file below a folder, and what is in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
