"""Training steps by the dozen, and the verdict of the record axis on them without a training around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from dpbench.privacy.record_axis.verdict import Verdict
from tests.support.verdicts import verdict_of_step

Batch = Any
Step = Callable[["Steps", Batch], Any]


class Steps(pl.LightningModule):
    """A network and a training step that a test gives; `lots` counts the lots that were trained on."""

    def __init__(self, net: nn.Module, step: Step) -> None:
        super().__init__()
        self.net, self.step, self.lots = net, step, 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.step(self, batch)


def verdicts(
    module: Steps,
    batches: Sequence[Batch],
    records: Sequence[int],
    rows_of_record: int = 1,
    autocast: bool = False,
) -> list[Verdict]:
    """The record axis on batch after batch, with an ordinary step between two: what it keeps is there for the next."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    seen = []
    for batch, count in zip(batches, records, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            optimizer.zero_grad()
            _, verdict = verdict_of_step(lambda b: module.training_step(b, 0), batch, count, module, rows_of_record)
        seen.append(verdict)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        module.lots += 1
    return seen


def lots_of(records: Callable[[torch.Generator, int], Batch], sizes: Sequence[int], seed: int) -> list[Batch]:
    """Lots of made-up records, which `records` makes from a generator, so many at once."""
    generator = torch.Generator().manual_seed(seed)
    return [records(generator, size) for size in sizes]


def vectors(generator: torch.Generator, size: int) -> Batch:
    """Six numbers and one of three classes."""
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def images(generator: torch.Generator, size: int) -> Batch:
    """One channel of 8 × 8 pixels."""
    return torch.rand(size, 1, 8, 8, generator=generator), torch.randint(3, (size,), generator=generator)


def sequences(generator: torch.Generator, size: int) -> Batch:
    """Five steps of six numbers, a length, and a class."""
    lengths = torch.randint(1, 6, (size,), generator=generator)
    lengths[0] = 5
    x = torch.randn(size, 5, 6, generator=generator)
    return x, lengths, torch.randint(3, (size,), generator=generator)


def tokens(generator: torch.Generator, size: int) -> Batch:
    """Eight tokens of twenty, a mask, and a class."""
    ids = torch.randint(20, (size, 8), generator=generator)
    lengths = torch.randint(2, 9, (size, 1), generator=generator)
    mask = (torch.arange(8) < lengths).long()
    return ids, mask, torch.randint(3, (size,), generator=generator)
