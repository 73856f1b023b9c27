"""Recipes of large networks, on tiny networks and data: that their parts go together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.support.cli import dpbench

IMAGES = [
    "data=random_noise",
    "data.train_size=24",
    "data.test_size=8",
    "data.image_size=8",
    "data.expected_batch_size=6",
]


def trained(folder: Path, words: Sequence[str]) -> None:
    """Train two steps, with per-record gradients by the engine."""
    _, err = dpbench(folder, "train", *words, "trainer.max_steps=2", "logger=none", "hydra.run.dir=run")
    assert "record by record" not in err
    assert json.loads((folder / "run" / "result.json").read_text())["steps"] == 2


def test_wide_resnet_with_views_and_a_moving_average(tmp_path: Path) -> None:
    model = ["model.depth=10", "model.width=1", "model.groups=4", "data.augmentations=3"]
    trained(tmp_path, ["experiment=recipes/wrn", *IMAGES, *model, "strategy.max_physical_batch_size=6"])
