"""Executors by name, and the keys of their runs.

Executors may round differently, and the same noise on two roundings of a sum would reveal their difference. So the
name of the executor is part of the keys of noise, batches and replays (`keyed_by`).
"""

from __future__ import annotations

from importlib.metadata import entry_points

import torch

from dpbench.canonical import digest_of
from dpbench.errors import ConfigurationError, shown
from dpbench.session.executor import REFERENCE, Executor

_PLUGINS = "dpbench.executors"
"""Group of entry points: a name, and a function of the text after its colon (`NAME:OPTIONS`) that makes an executor."""
_AUTO = "auto"
_ON_GPU = "graph"


def executor_of(name: str, device: torch.device) -> Executor:
    """The executor of a name.

    Guarantee: an executor of an entry point has keys of its own for each NAME:OPTIONS, whatever its class's name. It
    may round differently from the reference, and would reveal the difference of two roundings under one noise.

    Args:
        name: "auto" (graphs on a GPU), "eager", or NAME:OPTIONS of an entry point, such as "graph".

        device: The module's device.

    Raises:
        ConfigurationError: The executor is unknown, or its plug-in returns another type.
    """
    plugins = entry_points(group=_PLUGINS)
    if name == _AUTO:
        name = _ON_GPU if device.type == "cuda" and _ON_GPU in plugins.names else REFERENCE
    if name == REFERENCE:
        return Executor()
    kind, _, options = name.partition(":")
    for entry in plugins.select(name=kind):
        executor = entry.load()(options)
        if not isinstance(executor, Executor):
            raise ConfigurationError(
                f"the plug-in of executor {name!r} must return an Executor, not {shown(executor)}."
            )
        executor.name = f"{name}, {executor.name}"
        return executor
    known = [_AUTO, REFERENCE, *sorted(plugins.names)]
    raise ConfigurationError(f"unknown executor {name!r}; known are {', '.join(known)}.")


def keyed_by(key: int, executor: Executor) -> int:
    """The key of a run under an executor: 128 bits; that of the reference stays as it is."""
    if executor.name == REFERENCE:
        return key
    return int(digest_of([key, executor.name])[:32], 16)
