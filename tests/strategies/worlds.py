"""Small worlds in which everything that DP-SGD should do is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.privacy.mechanism.noise import grid_spacing
from dpbench.privacy.sampling import PoissonSampling
from dpbench.strategies import DPSGD


def update(module: pl.LightningModule, loss: Tensor) -> Tensor | None:
    """The end of a training step, in automatic or manual optimization."""
    if module.automatic_optimization:
        return loss
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()
    return None


class Known(pl.LightningModule):
    """The gradient of record r is x_r, whatever the weights: loss = mean_r ⟨w, x_r⟩. SGD with lr 1."""

    def __init__(self, width: int, manual: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.automatic_optimization = not manual
        self.history: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.layer(batch[0]).mean()
        return update(self, loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(self.layer.weight.detach().flatten().clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Classifier(pl.LightningModule):
    """A small convolutional classifier with dropout, like a user's own."""

    def __init__(self, manual: bool = False, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3),
            nn.GroupNorm(2, width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(width * 36, 3),
        )
        self.automatic_optimization = not manual

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        return update(self, loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def pictures(size: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 3, (size,), generator=generator)
    images = torch.randn(size, 1, 8, 8, generator=generator) + labels[:, None, None, None]
    return TensorDataset(images, labels)


def loader_of(
    data: TensorDataset, expected: float = 12, seed: int | None = 0, kind: str = "poisson"
) -> PrivateDataLoader:
    rare = kind == "poisson" and expected < 1  # which a user is asked about
    sampling = PoissonSampling(len(data), expected / len(data)) if rare else make_sampling(kind, len(data), expected)
    return PrivateDataLoader(data, PrivateBatchSampler(sampling, seed))


def trainer_for(folder: Path, callback: pl.Callback, steps: int, package: Any = pl, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "max_steps": steps,
        "max_epochs": -1,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
        "default_root_dir": str(folder),
        "callbacks": [callback, *options.pop("more", [])],
    }
    return package.Trainer(**{**settings, **options})


def fit(
    folder: Path,
    module: pl.LightningModule,
    steps: int = 4,
    make: Callable[..., Any] = DPSGD,
    loader: Any = None,
    trainer: dict[str, Any] | None = None,
    start: Path | None = None,
    **options: Any,
) -> Any:
    """Train by a strategy with some options, on pictures where no loader is given, and return the strategy."""
    strategy = make(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})
    fitted = trainer_for(folder, strategy, steps, **(trainer or {}))
    fitted.fit(module, loader or loader_of(pictures()), ckpt_path=start, weights_only=False)
    return strategy


class Crash(pl.Callback):
    """Saves a checkpoint after a step, and ends the training two releases later."""

    observes_only = True

    def __init__(self, checkpoint: Path, step: int) -> None:
        self._checkpoint = checkpoint
        self._step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._checkpoint)
        if trainer.global_step == self._step + 2:
            raise RuntimeError("crash")


def crashed(folder: Path, module: pl.LightningModule, steps: int, at: int, **options: Any) -> Path:
    """The checkpoint of a step of a training that crashed two releases later."""
    checkpoint = folder / "mid.ckpt"
    with pytest.raises(RuntimeError, match="crash"):
        fit(folder, module, steps, trainer={"more": [Crash(checkpoint, at)]}, **options)
    return checkpoint


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def clipped_sum(losses: Iterable[Tensor], parameters: Sequence[Tensor], bound: float) -> list[Tensor]:
    """Sum of the clipped gradients of records' losses, one after the other by autograd."""
    total = [torch.zeros_like(p) for p in parameters]
    for loss in losses:
        gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
        norm = float(torch.stack([g.square().sum() for g in gradient]).sum().sqrt())
        for part, g in zip(total, gradient, strict=True):
            part += min(1.0, bound / norm) * g
    return total


def assert_same_training(
    two: Tensor,
    one: Tensor,
    noise_std: float,
    expected_batch_size: float,
) -> None:
    """Weights agree to rounding: the sum of two processes may fall on the other side of a boundary of the noise's grid.

    A cell is 1/128 to 1/256 of the noise; four of them allow for one such step and what momentum makes of it.
    """
    cell = grid_spacing(noise_std) / expected_batch_size
    torch.testing.assert_close(two, one, rtol=1e-4, atol=4 * cell)
