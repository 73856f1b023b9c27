"""Data, modules and callbacks of one's own, from a configuration folder of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.data.loader import PrivateDataLoader
from tests.support.cli import dpbench

POINTS = TensorDataset(torch.randn(200, 3, generator=torch.Generator().manual_seed(0)))


class Points(pl.LightningDataModule):
    def __init__(self, size: int = 20, seed: int | None = None) -> None:
        super().__init__()
        self.size, self.seed = size, seed

    def setup(self, stage: str) -> None:
        self.points = POINTS

    def train_dataloader(self) -> Any:
        return PrivateDataLoader.poisson(self.points, self.size, seed=self.seed)


class Shuffled(Points):
    def train_dataloader(self) -> Any:
        return DataLoader(POINTS, self.size, shuffle=True)


class OtherSeed(Points):
    def train_dataloader(self) -> Any:
        return PrivateDataLoader.poisson(POINTS, self.size, seed=5)


class NoSeed(Points):
    def __init__(self, size: int = 20) -> None:
        super().__init__(size)


class Line(pl.LightningModule):
    """Makes model and optimizer itself."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.line = nn.Linear(width, 1)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.line(batch[0])[:, 0], batch[0].sum(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(pl.Callback):
    """Writes a line into the run's folder."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (Path(trainer.default_root_dir) / "note.txt").write_text(f"{self.text} {trainer.global_step}")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A task without an image, a class or a test set."""
    for group, names in {"data": ["Points", "Shuffled", "OtherSeed", "NoSeed"], "module": ["Line"]}.items():
        (tmp_path / "mine" / group).mkdir(parents=True)
        for name in names:
            (tmp_path / "mine" / group / f"{name.lower()}.yaml").write_text(f"_target_: {__name__}.{name}\n")
    parts = ["data=points", "module=line", "model=none", "optimizer=none", "trainer.max_steps=2", "+data.size=20"]
    quiet = ["logger=none", "hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.run.dir=run"]
    return ["train", "--config-dir=mine", *parts, *quiet]


def test_a_task_that_is_none_of_ours(words: list[str], tmp_path: Path) -> None:
    mine = f"+callbacks.notes={{_target_:{__name__}.Notes,text:ended}}"
    dpbench(tmp_path, *words, "strategy=dpsgd", "strategy.delta=1e-3", mine)
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["steps"] == 2 and record["foreign_code"].keys() == {"tests"}
    assert record["privacy"]["epsilon"]["rdp"] > 0
    assert (tmp_path / "run" / "note.txt").read_text() == "ended 2"
    assert not any(name.startswith(("val/", "test/")) for name in record["metrics"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("data=shuffled", "Shuffled.train_dataloader gives a DataLoader, whose sampling no ledger knows"),
        ("data=otherseed", "OtherSeed does not pass its seed to its PrivateDataLoader"),
        ("data=noseed", "takes no seed, so its batches could not be repeated"),
        ("model=mlp", "Line takes no model: choose model=none"),
        ("+callbacks.notes={_target_:tests.harness.run.test_tasks.Notes}", "callbacks.notes.text is missing"),
        ("+callbacks.more={_target_:dpbench.strategies.ClipOnly}", "callbacks.more is a strategy"),
    ],
)
def test_what_does_not_keep_to_the_protocol(more: str, message: str, words: list[str], tmp_path: Path) -> None:
    _, err = dpbench(tmp_path, *words, more, status=1)
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
