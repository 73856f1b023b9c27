"""Rounds that are functions: the limit, and the loop that one writes first."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.plain import laid_out
from benchmarks.users.tasks import CLIP, MOMENTUM, NOISE, Task, loss

Round = Callable[[], object]
_FEW = 10  # users by whom the fastest way is found


def add_functions(functions: dict[str, Round], task: Task, users: int, methods: Sequence[str]) -> dict[str, str]:
    """Make the rounds of some methods; a method that is none of these is the round of the trainer's loop.

    Args:
        functions: The rounds are put here, by method.
        task: What users train.
        users: In a round.
        methods: Names of methods.

    Returns:
        What is said of the limit.
    """
    facts = {}
    for method in methods:
        if method == "limit":
            functions[method], facts["limit"] = limit(task, users)
        elif method.startswith("naive"):
            functions[method] = naive(task, users)
    return facts


def limit(task: Task, users: int, tries: int = 2) -> tuple[Round, str]:
    """The gradients of all users' rows at one point, in the batch size and layout that turn out fastest here.

    Returns:
        The round; and a word for what was fastest.
    """
    times = {}
    for size, layout in task.plain:
        go = _gradients(task, min(users, _FEW), size, layout)
        times[size, layout] = min(_seconds(go) for _ in range(1 + tries))
    size, layout = min(times, key=times.__getitem__)
    word = "channels-last" if layout is torch.channels_last else "contiguous"
    return _gradients(task, users, size, layout), f"batches of {size}, {word}"


def _gradients(task: Task, users: int, size: int, layout: torch.memory_format) -> Round:
    model = task.model().to(memory_format=layout)
    inputs, targets = (x.flatten(0, 1) for x in task.data(users))
    inputs = laid_out(inputs, layout)

    def go() -> None:
        model.zero_grad()
        for x, y in zip(torch.split(inputs, size), torch.split(targets, size), strict=True):
            loss(model(x), y).backward()  # type: ignore[no-untyped-call]

    return go


def naive(task: Task, users: int) -> Round:
    """A copy of the network and a torch.optim.SGD for each user; clipped sum, noise, server SGD with momentum."""
    server = task.model()
    inputs, targets = task.data(users)
    parameters = list(server.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=MOMENTUM)

    def update(user: int) -> list[Tensor]:
        client = copy.deepcopy(server)
        local = torch.optim.SGD(client.parameters(), lr=task.lr)
        for rows in torch.split(torch.randperm(task.rows_of_user), task.batch):
            local.zero_grad()
            loss(client(inputs[user, rows]), targets[user, rows]).backward()  # type: ignore[no-untyped-call]
            local.step()
        return [p.detach() - own.detach() for p, own in zip(parameters, client.parameters(), strict=True)]

    def go() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for user in range(users):
            difference = update(user)
            norm = float(torch.stack([change.norm() for change in difference]).norm())
            for accumulated, change in zip(total, difference, strict=True):
                accumulated.add_(change * min(1.0, CLIP / norm))
        for p, accumulated in zip(parameters, total, strict=True):
            p.grad = (accumulated + NOISE * CLIP * torch.randn_like(accumulated)) / users
        optimizer.step()

    return go


def _seconds(go: Round) -> float:
    start = time.process_time()
    go()
    return time.process_time() - start
