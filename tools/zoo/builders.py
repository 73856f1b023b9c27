"""Which builder makes which architecture of the list."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tools.zoo.architectures import Architecture
from tools.zoo.network import Network


def builder_of(architecture: Architecture) -> Callable[[], Network]:
    """What makes a network of the list; its library is imported when it is called."""
    return partial(_build, architecture)


def _build(architecture: Architecture) -> Network:
    library = architecture.library
    if library == "transformers":
        from tools.zoo import transformers_networks

        keep_dropout = architecture.family == "with dropout"
        return transformers_networks.build(architecture.name, architecture.step, keep_dropout)
    raise NotImplementedError(f"{library} has no builder")
