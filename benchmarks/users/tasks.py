"""What users train: a network, and random rows in the shape of its data. Needs torch and `dpbench.models` only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.models import EMNISTCNN, MLP, CharLSTM

CLIP, NOISE, MOMENTUM = 1.0, 1.0, 0.9  # clipping bound, noise multiplier, server momentum
Make = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Task:
    """A network and the local training of its users (adaptive_quantile_clipping_2021, Table 3, but for 5 steps a user).

    Attributes:
        name: Shown in tables.
        build: Makes the network.
        rows: (number, generator) → inputs and targets of so many rows.
        batch: Rows of a local step.
        lr: Of the local steps.
        plain: Batch sizes and layouts in which the limit is looked for.
        steps: Local steps of a user.
        asked: Largest CPU time ÷ limit that is the goal; None: there is none.
    """

    name: str
    build: Callable[[], nn.Module]
    rows: Make
    batch: int
    lr: float
    plain: tuple[tuple[int, torch.memory_format], ...]
    asked: float | None = None
    steps: int = 5

    @property
    def rows_of_user(self) -> int:
        """Number of rows of each user."""
        return self.steps * self.batch

    def data(self, users: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (users, rows, ...), the same in every process."""
        examples = self.rows(users * self.rows_of_user, torch.Generator().manual_seed(1))
        inputs, targets = (x.view(users, self.rows_of_user, *x.shape[1:]) for x in examples)
        return inputs, targets

    def model(self) -> nn.Module:
        """The network with the same weights in every process, in the layout that `dpbench train` gives images."""
        torch.manual_seed(0)
        return self.build().train().to(memory_format=torch.channels_last)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of scores (..., classes)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _images(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.rand(number, 1, 28, 28, generator=generator)
    return images, torch.randint(62, (number,), generator=generator)


def _speeches(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(1, 90, (2, number, 80), generator=generator)
    return inputs, targets


_BOTH = (torch.contiguous_format, torch.channels_last)
TASKS = {
    task.name: task
    for task in (
        Task(
            "emnist_cnn 5x20",
            partial(EMNISTCNN, (1, 28, 28), 62),
            _images,
            20,
            0.032,
            tuple((size, layout) for size in (20, 50, 100, 500) for layout in _BOTH),
            1.25,
        ),
        Task(
            "char_lstm 5x4",
            partial(CharLSTM, 90),
            _speeches,
            4,
            1.0,
            tuple((size, torch.contiguous_format) for size in (4, 10, 20, 50)),
            1.5,
        ),
        Task(
            "mlp_2nn 5x20",
            partial(MLP, (1, 28, 28), 62, (200, 200)),
            _images,
            20,
            0.1,
            tuple((size, torch.contiguous_format) for size in (20, 100, 500)),
        ),
    )
}
