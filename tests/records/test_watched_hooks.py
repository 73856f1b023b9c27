"""Hooks between the loader and the step keep records apart, or are refused with the line."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import CarriedRecordsError, UnsupportedModuleError
from dpbench.strategies import DPSGD
from tests.strategies.worlds import trainer_for
from tests.support.one_by_one import used


class Net(pl.LightningModule):
    """Classifies six numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.mu: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0] - self.mu), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Transfer(Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch[0].to(device) / batch[0].abs().max(), batch[1].to(device)


class After(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return 0.6 * batch[0] + 0.4 * batch[0].roll(1, 0), batch[1]


class InPlace(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].sub_(batch[0].mean(0))


class Reads(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] / 255 if batch[0].max() > 100 else batch[0]), batch[1]


class Center(Net):
    """Kept in an attribute."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mu = batch[0].mean(0)


class CenterByNumber(Net):
    """Read, and put back."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mu = batch[0].mean().item()


class Apart(Net):
    """Each record by itself, in four hooks."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] - batch[0].mean(1, keepdim=True), batch[1]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return tuple(x.to(device) for x in batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(2)
        self.log("mean", batch[0].mean())


def records() -> TensorDataset:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, torch.arange(40) % 3)


def fit(folder: Path, module: Net, collate: Any = None, **options: Any) -> DPSGD:
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, **options)
    loader = PrivateDataLoader.poisson(records(), 16, seed=0, collate_fn=collate)
    trainer_for(folder, strategy, 2).fit(module, loader, DataLoader(records(), 8))
    return strategy


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Transfer, "transfer_batch_to_device mixes the records .*: reduces over the records"),
        (After, "on_after_batch_transfer mixes the records .*: works along the records"),
        (InPlace, "on_train_batch_start mixes the records"),
        (Reads, "on_after_batch_transfer reads values of records"),
    ],
    ids=["transfer", "after", "in place", "reads"],
)
def test_what_mixes_before_the_step_is_refused(tmp_path: Path, kind: type[Net], words: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=words):
        fit(tmp_path, kind())


@pytest.mark.parametrize("gradients", ["auto", "one_by_one"])
def test_attributes_that_are_made_of_records(tmp_path: Path, gradients: Any) -> None:
    with pytest.raises(CarriedRecordsError):
        fit(tmp_path / "kept", Center(), gradients=gradients)
    module = CenterByNumber()
    fit(tmp_path / "read", module, gradients=gradients)
    assert module.mu == 0.0


class Entry(Net):
    """Another tensor in the place of an entry, and a new entry."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["x"] = 2 * batch["x"]
        batch["twice"] = batch["x"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch["twice"] is batch["x"] or torch.equal(batch["twice"], batch["x"])
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class MixedEntry(Entry):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["x"] = batch["x"] - batch["x"].mean(0)


def test_entries_that_a_hook_sets(tmp_path: Path) -> None:
    """They are in the batch that the step is given."""

    def collate(items: Any) -> Any:
        x, y = default_collate(items)
        return UserDict(x=torch.cat([x, x])[: len(x)], y=y)  # a part of other memory

    assert used(fit(tmp_path / "apart", Entry(), collate)) == "engine"
    with pytest.raises(UnsupportedModuleError, match="on_train_batch_start mixes the records"):
        fit(tmp_path / "mixed", MixedEntry(), collate)


def test_each_record_by_itself(tmp_path: Path) -> None:
    assert used(fit(tmp_path, Apart())) == "engine"
