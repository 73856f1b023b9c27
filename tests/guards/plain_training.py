"""A training that nobody drives: what probes and states of a module need of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpbench.records.training import Training, TrainingStep


class PlainTraining(Training):
    """A module, optimizers and no driver."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
        super().__init__(module)
        self._optimizers = optimizers

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._optimizers

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def own_step(self) -> TrainingStep:
        step: TrainingStep = self.module.training_step
        return step

    def mount(self, step: TrainingStep, backward: Callable[..., None]) -> None:
        raise AssertionError("nobody trains")


def plain_training(module: Any, *optimizers: Optimizer) -> PlainTraining:
    return PlainTraining(module, optimizers)
