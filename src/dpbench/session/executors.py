"""Executors by name, and the keys of their runs.

Executors may round differently, and the same noise on two roundings of a sum would reveal their difference. So the
name of the executor is part of the keys of noise, lots and replays (`keyed_by`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from dpbench.canonical import digest_of
from dpbench.errors import ConfigurationError
from dpbench.records.training import TrainingStep
from dpbench.session.executor import REFERENCE, Executor, SessionParts
from dpbench.session.graphs import Graphs
from dpbench.session.stacked import Stacked

ExecutorName = Literal["auto", "eager", "graph", "stack"]
"""Of an executor; "auto" takes graphs on a GPU."""


class Auto(Executor):
    """Graphs on a GPU, and eager elsewhere: what no graph can hold of a training, graphs leave to Python."""

    def __init__(self) -> None:
        self._chosen = Executor()
        self.name = self._chosen.name

    def attach(self, parts: SessionParts) -> None:
        """Choose by where the module is."""
        super().attach(parts)
        self._chosen = Graphs() if parts.training.device.type == "cuda" else Executor()
        self.name = self._chosen.name
        self._chosen.attach(parts)

    def detach(self) -> None:
        """Have the chosen one let go."""
        super().detach()
        self._chosen.detach()

    def own_step(self, own: TrainingStep) -> TrainingStep:
        """As the chosen one."""
        return self._chosen.own_step(own)

    def step(self, step: TrainingStep) -> TrainingStep:
        """As the chosen one."""
        return self._chosen.step(step)

    def backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        """As the chosen one."""
        return self._chosen.backward(backward)

    def release(self) -> list[Tensor]:
        """As the chosen one."""
        return self._chosen.release()


def executor_of(name: str, stack_size: int = 1) -> Executor:
    """The executor of that name.

    Args:
        name: Of the executor.
        stack_size: Number of runs whose steps "stack" carries out together.

    Raises:
        ConfigurationError: There is none.
    """
    executors: dict[str, Callable[[], Executor]] = {
        "auto": Auto,
        REFERENCE: Executor,
        "graph": Graphs,
        "stack": partial(Stacked, stack_size),
    }
    if name not in executors:
        raise ConfigurationError(f"unknown executor {name!r}; known are {', '.join(executors)}.")
    return executors[name]()


def keyed_by(key: int | None, executor: Executor) -> int | None:
    """The key of a run under an executor: 128 bits; that of the reference stays as it is, and so does None."""
    if key is None or executor.name == REFERENCE:
        return key
    return int(digest_of([key, executor.name])[:32], 16)
