"""Waves of unknown frequency, sampled with noise."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpbench import PrivateDataLoader


def waves(number: int, length: int, key: int) -> TensorDataset:
    """Records (length,) and frequencies ()."""
    generator = torch.Generator().manual_seed(key)
    frequencies = 0.5 + torch.rand(number, generator=generator)
    times = torch.linspace(0, 3, length)
    records = torch.sin(2 * frequencies[:, None] * times) + 0.05 * torch.randn(number, length, generator=generator)
    return TensorDataset(records, frequencies)


class Waves(pl.LightningDataModule):
    """Noisy waves; the target is the frequency.

    Args:
        length: Points of a wave.
        expected_batch_size: Mean number of waves in a lot.
        val_size: Waves held out.
        seed: Key of the lots, from dpbench; None takes the operating system's entropy.
    """

    def __init__(
        self, length: int = 16, expected_batch_size: float = 64, val_size: int = 0, seed: int | None = None
    ) -> None:
        super().__init__()
        self.length, self.expected_batch_size, self.val_size, self.seed = length, expected_batch_size, val_size, seed

    def model_options(self) -> dict[str, Any]:
        """What a model is told of the data."""
        return {"length": self.length}

    @property
    def monitored(self) -> str:
        """Which data the validation loop sees: the test data, where none are held out."""
        return "val" if self.val_size else "test"

    def train_dataloader(self) -> PrivateDataLoader:
        """Poisson lots."""
        return PrivateDataLoader.poisson(waves(1024, self.length, 0), self.expected_batch_size, seed=self.seed)

    def val_dataloader(self) -> DataLoader[Any]:
        """Waves that were held out, or the test data."""
        if not self.val_size:
            return self.test_dataloader()
        return DataLoader(waves(self.val_size, self.length, 1), batch_size=256)

    def test_dataloader(self) -> DataLoader[Any]:
        """Other waves."""
        return DataLoader(waves(256, self.length, 2), batch_size=256)
