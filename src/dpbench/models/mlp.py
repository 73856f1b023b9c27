"""Multilayer perceptrons: that of PyVacy, and one that predicts numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from dpbench.models.shapes import Size

Widths = list[Size] | tuple[Size, ...]


def _layers(
    input_shape: tuple[int, ...],
    hidden: Sequence[int],
    outputs: int,
    activation: Callable[[], nn.Module],
) -> list[nn.Module]:
    """Fully connected layers with an activation between them."""
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), activation()]
    return [*layers, nn.Linear(widths[-1], outputs)]


class MLP(nn.Sequential):
    """Fully connected layers with ReLU between them: 784-1000-10 on MNIST, 795,010 parameters.

    Used by Waites 2019 (pyvacy_2019, section 5.1).

    Args:
        input_shape: Shape of a record: (channels, height, width) of an image, or (8,) of eight features.
        num_classes: Number of classes.
        hidden: Width of each hidden layer, or of the only one.

    Shape:
        (N, *input_shape) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        hidden: Widths | Size = (1000,),
    ) -> None:
        if isinstance(hidden, int):
            hidden = [hidden]
        super().__init__(*_layers(input_shape, hidden, num_classes, nn.ReLU))


class RegressionMLP(nn.Sequential):
    """Fully connected layers with tanh between them, and a number for each target: for tables.

    Bounded activations keep gradients small, so that clipping costs less (Papernot et al. 2021, "Tempered sigmoid
    activations").

    Args:
        input_shape: Shape of a record's features, such as (8,).
        num_targets: Numbers to predict for each record.
        hidden: Width of each hidden layer; none: a linear regression.

    Shape:
        (N, *input_shape) → (N, num_targets).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_targets: int,
        hidden: Widths = (32, 32),
    ) -> None:
        super().__init__(*_layers(input_shape, hidden, num_targets, nn.Tanh))
