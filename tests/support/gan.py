"""A small GAN and a few images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.models import MLPGAN
from dpbench.modules import GAN
from dpbench.strategies import (
    DPSGD,
)
from tests.strategies.worlds import loader_of, trainer_for

SHAPE, CLASSES = (1, 8, 8), 3


def images(size: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return TensorDataset(torch.rand(size, *SHAPE, generator=generator) * 2 - 1, labels)


def gan(cls: type[GAN] = GAN, pair: type[nn.Module] = MLPGAN, conditional: bool = False, **options: Any) -> GAN:
    torch.manual_seed(3)
    model: Any = pair(SHAPE, CLASSES, conditional=conditional, noise_size=6)
    adam = partial(torch.optim.Adam, lr=0.01)
    return cls(model, adam, CLASSES, generator_optimizer=adam, **{"generator_batch_size": 8, **options})


def fit(folder: Path, module: GAN, strategy: pl.Callback | None = None, steps: int = 6, **options: Any) -> pl.Trainer:
    trainer = trainer_for(folder, strategy or DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3), steps, **options)
    trainer.fit(module, loader_of(images()))
    return trainer


def flat(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in module.state_dict().values()]).nan_to_num()
