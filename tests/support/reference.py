"""The slow truth: gradients record by record with ordinary autograd, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor], Tensor]


def mean_square(model: nn.Module, inputs: Tensor) -> Tensor:
    """A loss that is the mean over records of something that depends on each record's output alone."""
    outputs = model(inputs)
    return (outputs.flatten(1).square().mean(1) + outputs.flatten(1).sin().mean(1)).mean()


def reference_gradients(model: nn.Module, inputs: Tensor, loss: Loss = mean_square) -> dict[str, Tensor]:
    """Per-record gradients (R, *shape) of each trainable parameter, in float64."""
    model = copy.deepcopy(model).double()
    model.train()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for record in range(len(inputs)):
        value = loss(model, inputs[record : record + 1])
        grads = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        for (name, p), grad in zip(named.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if grad is None else grad)
    return {
        name: torch.stack(r) if r else p.new_zeros(0, *p.shape)
        for (name, p), r in zip(named.items(), rows.values(), strict=True)
    }


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Distance over the expected norm; absolute where that is zero."""
    if expected.numel() == 0:
        return 0.0 if actual.shape == expected.shape else float("inf")
    norm = float(expected.double().norm())
    return float((actual.double() - expected.double()).norm()) / (norm or 1.0)
