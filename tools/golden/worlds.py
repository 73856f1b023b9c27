"""Tiny data and networks of the golden runs; none of their numbers comes from a file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Rows
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.privacy.sampling import (
    CyclicPoissonSampling,
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Sampling,
    SeparatedSampling,
    TruncatedPoissonSampling,
)

EXAMPLES = 60
CLASSES = 3
SIDE = 6
SIZES = (3, 1, 0, 7, 2, 1, 2, 4, 3, 2, 9, 2, 1, 1, 3, 2, 1, 5, 2, 1, 2, 1, 4, 1)
"""Examples of each user."""
_WORDS = 8

SAMPLINGS: dict[str, Callable[[int, str], Sampling]] = {
    "poisson": lambda population, unit: PoissonSampling(population, 0.2, unit=unit),
    "sparse_poisson": lambda population, unit: PoissonSampling(population, 1 / population, unit=unit),
    "truncated_poisson": lambda population, unit: TruncatedPoissonSampling(population, 0.2, population // 5, unit=unit),
    "fixed_size": lambda population, unit: FixedSizeSampling(population, population // 5, unit=unit),
    "full": lambda population, unit: FullParticipation(population, unit=unit),
    "cyclic_poisson": lambda population, unit: CyclicPoissonSampling(population, 0.2, cycle_length=4, unit=unit),
    "min_separation": lambda population, unit: SeparatedSampling(population, 5, unit=unit),
}
"""Name → sampling of a population of units. Of the sparse lots every third is empty."""


def examples(dtype: torch.dtype = torch.float32) -> Rows:
    """Images (EXAMPLES, 1, SIDE, SIDE) and their labels."""
    generator = np.random.default_rng(7)
    labels = generator.integers(CLASSES, size=EXAMPLES)
    images = generator.normal(size=(EXAMPLES, 1, SIDE, SIDE)) + labels[:, None, None, None]
    return Rows(torch.tensor(images, dtype=dtype), torch.tensor(labels))


def users(dtype: torch.dtype = torch.float32) -> UserDataset:
    """The same examples, each of one of the users."""
    owners = np.random.default_rng(8).permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    return UserDataset(examples(dtype), owners, names=range(len(SIZES)))


def lots_of(sampling: str, by_user: bool, seed: int | None, dtype: torch.dtype = torch.float32) -> PrivateDataLoader:
    """The data set, drawn by the sampling of a name."""
    dataset: Any = users(dtype) if by_user else examples(dtype)
    scheme = SAMPLINGS[sampling](len(dataset), "user" if by_user else "example")
    return PrivateDataLoader(dataset, PrivateBatchSampler(scheme, seed))


class _Words(nn.Module):
    """Images as sequences of words: rows of (SIDE, SIDE) numbers, rounded."""

    def forward(self, images: Tensor) -> Tensor:
        return (images[:, 0, :, 0] * 2).round().long().clamp(0, _WORDS - 1)


class _LastState(nn.Module):
    """The last output of a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 6, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.gru(inputs)[0]
        return outputs[:, -1]


def _dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 8), nn.LayerNorm(8), nn.Tanh())


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(SIDE**2, 8), nn.Tanh())


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten())


def _recurrent() -> nn.Module:
    return nn.Sequential(_Words(), nn.Embedding(_WORDS, 5), _LastState())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "dense": (_dense, 8),
    "dropout": (_dropout, 8),
    "convolution": (_convolution, 8),
    "recurrent": (_recurrent, 6),
}
"""Name → (what makes its body, width of the body's output)."""


def network(name: str) -> nn.Module:
    """A network whose parameters are named body.* and output.*, with the same weights each time."""
    torch.manual_seed(5)
    body, width = NETWORKS[name]
    return nn.Sequential(OrderedDict(body=body(), output=nn.Linear(width, CLASSES)))


def losses_of(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits (R, CLASSES) and losses (R,) of a batch."""
    logits = model(batch[0])
    return logits, F.cross_entropy(logits, batch[1], reduction="none")


def mean_loss(model: Any, batch: Any) -> Tensor:
    """The loss function of a plain loop."""
    return losses_of(model, batch)[1].mean()


class Classifier(pl.LightningModule):
    """Trains a network as a user's own module would.

    Args:
        model: The network.
        manual: Whether the module makes its updates itself.
        lr: Learning rate of SGD with momentum.
    """

    record_metrics = {"accuracy": 1, "loss": 1}  # noqa: RUF012

    def __init__(self, model: nn.Module, manual: bool, lr: float) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.automatic_optimization = not manual

    def noise_batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Made-up records, from which first bounds are found."""
        images = torch.randn(size, 1, SIDE, SIDE, generator=generator)
        return images, torch.randint(CLASSES, (size,), generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any] | None:
        """Mean loss of a lot, and the values of the private metrics."""
        logits, losses = losses_of(self.model, batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(losses.mean())
            optimizer.step()
            return None
        accuracy = (logits.argmax(1) == batch[1]).float()
        return {"loss": losses.mean(), "record_metrics": {"accuracy": accuracy, "loss": losses.detach()}}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer that a plain loop gets, too."""
        return optimizer_of(self, self.lr)


def optimizer_of(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.5)
