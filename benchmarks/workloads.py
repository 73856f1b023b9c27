"""What is trained: a network and a lot of random records in the shape of its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from dpbench.models import MLP, MNISTCNN, DenseNet, SmallAlexNet, WideResNet

MNIST = (1, 28, 28)
CIFAR = (3, 32, 32)
FIRST_WORKLOAD = "mnist_cnn b256"
FOUR = (FIRST_WORKLOAD, "mlp b256", "small_alexnet b128", "densenet40 b64")  # which stand for all
STARTUP = "start-up"  # stands where rows have their workload


@dataclass(frozen=True)
class Workload:
    """A model and the size of its lots.

    Attributes:
        name: Shown in tables.
        build: Makes the network.
        input_shape: Of a record: (channels, height, width), or (steps, width).
        batch: Records in a lot.
        harness: Words after `dpbench train` that give the same step, on data of the same shape; none: there are none.
        microbatch_size: Examples of a record, on average.
        records: In the data set that it stands for: MNIST or CIFAR-10; 0: for none.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch: int
    harness: tuple[str, ...]
    microbatch_size: int = 1
    records: int = 0

    def data(self) -> tuple[Tensor, Tensor]:
        """Records (N, C, H, W) and labels (N,), the same in every process."""
        generator = torch.Generator().manual_seed(1)
        records = torch.randn(self.batch, *self.input_shape, generator=generator)
        return records, torch.randint(0, 10, (self.batch,), generator=generator)

    def model(self) -> nn.Module:
        """The network with the same weights in every process."""
        torch.manual_seed(0)
        return self.build()


class Recurrent(nn.Module):
    """The last output of an LSTM, classified."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of sequences (N, T, width)."""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class Attentive(nn.Module):
    """Two self-attentions with residuals, averaged over positions and classified."""

    def __init__(self, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(width, heads, batch_first=True)
        self.second = nn.MultiheadAttention(width, heads, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes) of sequences (N, T, width)."""
        for layer in (self.first, self.second):
            x = x + layer(x, x, x, need_weights=False)[0]
        scores: Tensor = self.head(x.mean(1))
        return scores


# Noise in the shape and number of a user's records: no files are needed, and an epoch is as long as a user's.
_LIKE_MNIST = ("data=random_noise", "data.test_size=1000", "data.like=mnist", "data.train_size=60000")
_LIKE_CIFAR = ("data=random_noise", "data.test_size=1000", "data.like=cifar10", "data.train_size=50000")
_MNIST_CNN = Workload(
    "mnist_cnn b256",
    partial(MNISTCNN, MNIST, 10),
    MNIST,
    256,
    ("model=mnist_cnn", *_LIKE_MNIST),
    records=60_000,
)
_MLP = Workload(
    "mlp b256",
    partial(MLP, MNIST, 10),
    MNIST,
    256,
    ("model=mlp", *_LIKE_MNIST),
    records=60_000,
)
_ALEXNET = Workload(
    "small_alexnet b128",
    partial(SmallAlexNet, CIFAR, 10),
    CIFAR,
    128,
    ("model=small_alexnet", *_LIKE_CIFAR),
    records=50_000,
)
_DENSENET = Workload(
    "densenet40 b64",
    partial(DenseNet, CIFAR, 10),
    CIFAR,
    64,
    ("model=densenet40", *_LIKE_CIFAR),
    records=50_000,
)


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


WORKLOADS = _by_name(
    _MNIST_CNN,
    _MLP,
    _ALEXNET,
    replace(_ALEXNET, name="small_alexnet b1024", batch=1024),
    _DENSENET,
    replace(_DENSENET, name="densenet40 b64, microbatches of 8", microbatch_size=8),
    Workload("lstm b128", partial(Recurrent, 64, 128, 10), (32, 64), 128, ()),
    Workload("attention b128", partial(Attentive, 128, 4, 10), (32, 128), 128, ()),
)
_WIDE_RESNET = Workload(
    "wide_resnet b256",
    partial(WideResNet, CIFAR, 10),
    CIFAR,
    256,
    ("model=wide_resnet", *_LIKE_CIFAR),
    records=50_000,
)
GPU_WORKLOADS = WORKLOADS | _by_name(_WIDE_RESNET)
