"""The step without privacy: what private training is measured against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.workloads import Workload

Step = Callable[[], None]


def plain(workload: Workload, memory_format: torch.memory_format, device: str, compiled: bool = False) -> Step:
    """Forward, backward, SGD."""
    model = workload.model().to(device, memory_format=memory_format)  # type: ignore[call-overload]
    x, y = (data.to(device) for data in workload.data())
    x = x.contiguous(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    if compiled:
        import torch._inductor.config as inductor

        inductor.cpp.dynamic_threads = True
        loss = torch.compile(loss)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
