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
    name = architecture.name
    step = architecture.step
    keep_dropout = architecture.family == "with dropout"
    if architecture.library == "transformers":
        from tools.zoo import transformers_networks

        return transformers_networks.build(name, step, keep_dropout)
    if architecture.library == "torchvision":
        from tools.zoo import image_networks

        return image_networks.build_torchvision(name, step, keep_dropout)
    if architecture.library == "timm":
        from tools.zoo import image_networks

        return image_networks.build_timm(name)
    if architecture.library == "torch_geometric":
        from tools.zoo import graph_networks

        return graph_networks.build(name)
    if architecture.family == "peft":
        from tools.zoo import peft_networks

        return peft_networks.build(name, step)
    from tools.zoo import own_networks

    return own_networks.build(name)
