"""Recipes of large networks, on tiny networks and data: that their parts go together."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.support.cli import dpbench

IMAGES = "data=random_noise data.train_size=24 data.test_size=8 data.image_size=8 data.expected_batch_size=6 "
TEXTS = "data.options.path=lines.csv data.options.features=[line,label] data.options.sequence_length=5 "
WRN = "model.depth=10 model.width=1 model.groups=4 data.augmentations=3"
TRANSFORMER = "model.width=12 model.depth=2 model.heads=3 data.expected_batch_size=8"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        pytest.param("recipes/wrn", IMAGES + WRN, marks=pytest.mark.long),
        pytest.param("large/vit_s", f"{IMAGES} model.patch_size=4 {TRANSFORMER}", marks=pytest.mark.long),
        pytest.param("large/bert_base", TEXTS + TRANSFORMER, marks=pytest.mark.slow),
    ],
)
def test_two_steps_by_the_engine(recipe: str, words: str, tmp_path: Path) -> None:
    rows = [(f"one of {number} words", number % 2) for number in range(40)]
    pd.DataFrame(rows, columns=["line", "label"]).to_csv(tmp_path / "lines.csv", index=False)
    run = "strategy.max_physical_batch_size=4 trainer.max_steps=2 logger=none hydra.run.dir=run"  # auto is for GPUs
    _, err = dpbench(tmp_path, "train", f"experiment={recipe}", *words.split(), *run.split())
    assert "record by record" not in err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
