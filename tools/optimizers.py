"""The optimizers that private training is tried with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.optim import SGD, Adagrad, Adam, RMSprop

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "Nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(Adam, lr=0.01),
    "AdaGrad": partial(Adagrad, lr=0.01),
    "RMSprop": partial(RMSprop, lr=0.01),
}
"""By the names of docs/combinations.md."""
