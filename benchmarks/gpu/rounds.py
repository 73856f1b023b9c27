"""A round of users on a GPU: one after the other, as the source of users does, and several at once (torch.func)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.users.ours import fit
from benchmarks.users.tasks import CLIP, MOMENTUM, NOISE, Task, loss
from dpbench.privacy.mechanism.clipping import clip_factors

Round = Callable[[], object]


def together(task: Task, users: int, at_once: int, device: str) -> Round:
    """Local training of `at_once` users in one call, clipped sum, noise, server SGD with momentum."""
    server = task.model().to(device)
    inputs, targets = (x.to(device) for x in task.data(users))
    steps = (task.steps, task.batch)
    inputs, targets = (x.view(len(x), *steps, *x.shape[2:]) for x in (inputs, targets))
    named = dict(server.named_parameters())
    optimizer = torch.optim.SGD(server.parameters(), lr=1.0, momentum=MOMENTUM)

    def value(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(server, own, (x,)), y)

    def update(own: dict[str, Tensor], xs: Tensor, ys: Tensor) -> dict[str, Tensor]:
        start = own
        for x, y in zip(xs.unbind(), ys.unbind(), strict=True):
            gradient = grad(value)(own, x, y)
            own = {name: p - task.lr * gradient[name] for name, p in own.items()}
        return {name: start[name] - p for name, p in own.items()}

    all_at_once = vmap(update, in_dims=(None, 0, 0), randomness="different")  # dropout

    def go() -> None:
        weights = {name: p.detach() for name, p in named.items()}
        total = {name: torch.zeros_like(p) for name, p in weights.items()}
        for first in range(0, users, at_once):
            piece = slice(first, first + at_once)
            rows = all_at_once(weights, inputs[piece], targets[piece])
            squared = torch.stack([row.flatten(1).square().sum(1) for row in rows.values()]).sum(0)
            factors = clip_factors(squared, CLIP)
            for name, row in rows.items():
                total[name].add_(torch.tensordot(factors, row, 1))
        for name, p in named.items():
            p.grad = (total[name] + NOISE * CLIP * torch.randn_like(p)) / users
        optimizer.step()

    return go


class _Clock(pl.Callback):
    """Seconds of each round of a trainer."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds: list[float] = []

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        """A round begins."""
        self._begun = self._now()

    def on_train_batch_end(self, *_: Any) -> None:
        """And ends, with its release."""
        self.seconds.append(self._now() - self._begun)


def in_turn(task: Task, users: int, repeats: int, device: str) -> list[float]:
    """Seconds of rounds of the source of users inside a Lightning trainer, without the first."""
    clock = _Clock(device)
    fit(task, users, [clock], max_steps=repeats + 1, device=device)
    return clock.seconds[1:]
