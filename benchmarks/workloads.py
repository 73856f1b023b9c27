"""What is trained: a network and a lot of random records in the shape of its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from dpbench.models import MLP, MNISTCNN, DenseNet, SmallAlexNet

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


@dataclass(frozen=True)
class Workload:
    """A model and the size of its lots.

    Attributes:
        name: Shown in tables.
        build: Makes the network.
        input_shape: (channels, height, width) of a record.
        batch: Records in a lot.
        harness: Words after `dpbench train` that give the same step, on data of the same shape.
        microbatch_size: Examples of a record, on average.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, int, int]
    batch: int
    harness: tuple[str, ...]
    microbatch_size: int = 1

    def data(self) -> tuple[Tensor, Tensor]:
        """Records (N, C, H, W) and labels (N,), the same in every process."""
        generator = torch.Generator().manual_seed(1)
        records = torch.randn(self.batch, *self.input_shape, generator=generator)
        return records, torch.randint(0, 10, (self.batch,), generator=generator)

    def model(self) -> nn.Module:
        """The network with the same weights in every process."""
        torch.manual_seed(0)
        return self.build()


_DIGITS = ("data=digits", "data.image_size=28")  # the shape of MNIST, without files
_MNIST_CNN = Workload("mnist_cnn b256", partial(MNISTCNN, MNIST, 10), MNIST, 256, ("model=mnist_cnn", *_DIGITS))
_MLP = Workload("mlp b256", partial(MLP, MNIST, 10), MNIST, 256, ("model=mlp", *_DIGITS))
_ALEXNET = Workload(
    "small_alexnet b128", partial(SmallAlexNet, CIFAR, 10), CIFAR, 128, ("model=small_alexnet", "data=cifar10")
)
_DENSENET = Workload("densenet40 b64", partial(DenseNet, CIFAR, 10), CIFAR, 64, ("model=densenet40", "data=cifar10"))

WORKLOADS = {
    workload.name: workload
    for workload in (
        _MNIST_CNN,
        _MLP,
        _ALEXNET,
        replace(_ALEXNET, name="small_alexnet b1024", batch=1024),
        _DENSENET,
        replace(
            _DENSENET,
            name="densenet40 b64, microbatches of 8",
            microbatch_size=8,
        ),
    )
}
