"""What a builder of the zoo makes: a network, its records, and the step that people would write for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

RECORDS = 6
CLASSES = 4

Step = Callable[[nn.Module, Any], Tensor]


@dataclass
class Network:
    """A network with random weights, and what it is trained on.

    Attributes:
        model: In training mode, as the library makes it.
        records: What an item of the data set is.
        step: Loss of a batch; the mean over its records.
        collate: Makes a batch of items; None: torch's.
        is_random: Whether the step draws random numbers, so that there is no reference to compare it with.
        keep_dropout: Whether dropout and stochastic depth stay as they are.
        fixes: What `dpbench.fix` did.
    """

    model: nn.Module
    records: Sequence[Any]
    step: Step
    collate: Callable[[Any], Any] | None = None
    is_random: bool = False
    keep_dropout: bool = False
    fixes: list[str] = field(default_factory=list)


def loss_of_output(net: nn.Module, batch: Any) -> Tensor:
    """The loss that networks of transformers compute of their batch."""
    loss: Tensor = net(**batch).loss
    return loss


def cross_entropy(net: nn.Module, batch: Any) -> Tensor:
    """Of the network's one output."""
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


def tokens(length: int, vocabulary: int = 60) -> Tensor:
    """Random words; the first few numbers are special ones."""
    return torch.randint(5, vocabulary, (length,))


def label(classes: int = CLASSES) -> Tensor:
    """A random class."""
    return torch.randint(0, classes, ())


def without_dropout(model: nn.Module) -> None:
    """Set all rates of dropout and stochastic depth to zero."""
    for module in model.modules():
        kind = type(module).__name__.lower()
        for name, value in list(vars(module).items()):
            is_rate = "drop" in name or (name == "p" and ("drop" in kind or "stochasticdepth" in kind))
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
