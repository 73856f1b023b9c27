"""The step without privacy: what private training is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Workload

Step = Callable[[], object]
"""Makes one step; the loss before it, where that costs nothing."""


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SGD: MakeOptimizer = partial(torch.optim.SGD, lr=0.01)


def laid_out(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Images in this layout; other data have one layout only."""
    return x.contiguous(memory_format=memory_format) if x.dim() == 4 else x


def on_device(
    workload: Workload, device: str, memory_format: torch.memory_format = torch.channels_last
) -> tuple[nn.Module, Tensor, Tensor]:
    """The network, its records and their labels."""
    model = workload.model().to(device, memory_format=memory_format)  # type: ignore[call-overload]
    x, y = (data.to(device) for data in workload.data())
    return model, laid_out(x, memory_format), y


def plain(
    workload: Workload,
    memory_format: torch.memory_format,
    device: str,
    compiled: bool = False,
    make_optimizer: MakeOptimizer = SGD,
) -> Step:
    """Forward, backward, SGD (or another optimizer)."""
    model, x, y = on_device(workload, device, memory_format)
    optimizer = make_optimizer(model.parameters())

    def forward() -> Tensor:
        return F.cross_entropy(model(x), y)

    if compiled:
        import torch._inductor.config as inductor

        # Else the number of threads at the time of compilation is compiled in, and turns change it.
        inductor.cpp.dynamic_threads = True
        forward = torch.compile(forward)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


class DrawnSizes:
    """The plain step on lots whose sizes differ as those of Poisson sampling do.

    Args:
        workload: Its lots have `workload.batch` records on average.
        memory_format: Of images.
        device: "cpu" or "cuda".

    Attributes:
        records: In the last lot.
    """

    def __init__(self, workload: Workload, memory_format: torch.memory_format, device: str) -> None:
        self._model, x, y = on_device(workload, device, memory_format)
        self._x = laid_out(torch.cat([x, x]), memory_format)
        self._y = torch.cat([y, y])
        self._optimizer = SGD(self._model.parameters())
        self._draws = torch.Generator().manual_seed(3)
        self.records = 0

    def __call__(self) -> Tensor:
        """Draw a size, then forward, backward and SGD."""
        size = torch.poisson(torch.tensor(len(self._x) / 2), generator=self._draws)  # a binomial of a small rate
        self.records = max(1, min(int(size), len(self._x)))
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._model(self._x[: self.records]), self._y[: self.records])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss
