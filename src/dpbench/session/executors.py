"""Executors by name, and the keys of their runs.

Executors may round differently, and the same noise on two roundings of a sum would reveal their difference. So the
name of the executor is part of the keys of noise, lots and replays (`keyed_by`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from torch import Tensor

from dpbench.canonical import digest_of
from dpbench.errors import ConfigurationError
from dpbench.options import shown
from dpbench.records.training import TrainingStep
from dpbench.session.executor import REFERENCE, Executor, SessionParts

_PLUGINS = "dpbench.executors"
"""Group of entry points: a name, and a function of what follows its colon (`NAME:OPTIONS`) that returns an executor."""
_ON_GPU = "graph"


class Auto(Executor):
    """The executor "graph" on a GPU, where there is one, and eager elsewhere."""

    def __init__(self) -> None:
        self._chosen = Executor()
        self.name = self._chosen.name

    def attach(self, parts: SessionParts) -> None:
        """Choose by where the module is."""
        super().attach(parts)
        is_on_gpu = parts.training.device.type == "cuda" and _ON_GPU in entry_points(group=_PLUGINS).names
        self._chosen = executor_of(_ON_GPU if is_on_gpu else REFERENCE)
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


def executor_of(name: str) -> Executor:
    """The executor of a name.

    Guarantee: an executor of an entry point has keys of its own for each NAME:OPTIONS, whatever its class is called. It
    may round differently from the reference, and would reveal the difference of two roundings under one noise.

    Args:
        name: "auto" (graphs on a GPU), "eager", or NAME:OPTIONS of an entry point, such as "graph".

    Raises:
        ConfigurationError: There is none, or the plug-in returns something else.
    """
    executors: dict[str, Callable[[], Executor]] = {"auto": Auto, REFERENCE: Executor}
    if name in executors:
        return executors[name]()
    kind, _, options = name.partition(":")
    plugins = entry_points(group=_PLUGINS)
    for entry in plugins.select(name=kind):
        executor = entry.load()(options)
        if not isinstance(executor, Executor):
            raise ConfigurationError(
                f"the plug-in of executor {name!r} must return an Executor, not {shown(executor)}."
            )
        executor.name = f"{name}, {executor.name}"
        return executor
    known = [*executors, *sorted(plugins.names)]
    raise ConfigurationError(f"unknown executor {name!r}; known are {', '.join(known)}.")


def keyed_by(key: int, executor: Executor) -> int:
    """The key of a run under an executor: 128 bits; that of the reference stays as it is."""
    if executor.name == REFERENCE:
        return key
    return int(digest_of([key, executor.name])[:32], 16)
