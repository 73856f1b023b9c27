"""Longer than a few seconds: the real data, the large networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import dpbench_in_a_process

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]


def train(folder: Path, *words: str) -> dict[str, object]:
    dpbench_in_a_process(folder, "train", "logger=none", "hydra.run.dir=run", *words)
    result: dict[str, object] = json.loads((folder / "run" / "result.json").read_text())
    return result


@pytest.mark.parametrize(
    ("model", "strategy"), [("small_alexnet", "dpsgd"), ("small_alexnet", "none"), ("densenet40", "dpsgd")]
)
def test_large_networks_on_cifar10(model: str, strategy: str, tmp_path: Path, data_folder: Path) -> None:
    words = ["data=cifar10", f"model={model}", f"strategy={strategy}", "data.expected_batch_size=32"]
    words += ["trainer.max_steps=4", "+trainer.limit_test_batches=2", f"data.root={data_folder}", "data.val_size=500"]
    result = train(tmp_path, *words)
    assert result["steps"] == 4
    privacy: dict[str, Any] = result["privacy"]  # type: ignore[assignment]
    if strategy == "dpsgd":  # who is held out is decided record by record
        assert abs(privacy["population"] - 49_500) < 150
    else:
        assert privacy["unit"] is None


def test_mnist_is_learned_privately(tmp_path: Path, data_folder: Path) -> None:
    result = train(tmp_path, "experiment=nasr/mnist_dpsgd", "trainer.max_steps=700", f"data.root={data_folder}")
    assert result["metrics"]["test/accuracy"] > 0.88  # type: ignore[index]
    assert result["privacy"]["epsilon"]["rdp"] < 1.0  # type: ignore[index]
