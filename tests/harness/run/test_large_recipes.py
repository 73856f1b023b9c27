"""Recipes of large networks, on tiny networks and data: that their parts go together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

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
    on_the_cpu = ["strategy.max_physical_batch_size=4"]  # auto is for GPUs
    run = ["trainer.max_steps=2", "logger=none", "hydra.run.dir=run"]
    _, err = dpbench(folder, "train", *words, *on_the_cpu, *run)
    assert "record by record" not in err
    assert json.loads((folder / "run" / "result.json").read_text())["steps"] == 2


@pytest.mark.long
def test_wide_resnet_with_views_and_a_moving_average(tmp_path: Path) -> None:
    model = ["model.depth=10", "model.width=1", "model.groups=4", "data.augmentations=3"]
    trained(tmp_path, ["experiment=recipes/wrn", *IMAGES, *model])


@pytest.mark.long
def test_vision_transformer(tmp_path: Path) -> None:
    model = ["model.patch_size=4", "model.width=12", "model.depth=2", "model.heads=3"]
    trained(tmp_path, ["experiment=large/vit_s", *IMAGES, *model])


@pytest.mark.slow
def test_encoder_of_texts(tmp_path: Path) -> None:
    rows = [(f"one of {number} words", number % 2) for number in range(40)]
    pd.DataFrame(rows, columns=["line", "label"]).to_csv(tmp_path / "lines.csv", index=False)
    data = ["data.options.path=lines.csv", "data.options.features=[line, label]", "data.options.sequence_length=5"]
    model = ["model.width=12", "model.depth=2", "model.heads=3", "data.expected_batch_size=8"]
    trained(tmp_path, ["experiment=large/bert_base", *data, *model])
