"""The trained parameters: releases go to all of them, and nothing else moves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard
from dpbench.guards.precision import PRECISIONS


class Parameters(Guard):
    """The optimizer updates the parameters that are released, and each batch begins without gradients."""

    name = "parameters"
    prevents = "parameters without a released gradient are updated, or gradients overflow in float16"

    def on_attach(self) -> None:
        """Compare the optimizer's parameters with those that are released."""
        self._refuse_others()

    def on_change(self) -> None:
        """Compare them again."""
        self._refuse_others()

    def _refuse_others(self) -> None:
        session = self.session
        refuse_optimizer(
            session.optimizer,
            session.trained.parameters,
            session.trained.names,
        )

    def on_open(self, batch: Any) -> None:
        """Begin a batch, of which hooks see nothing before its release."""
        parameters = self.session.trained.parameters
        refuse_half_parameters(parameters)
        for parameter in parameters:
            parameter.grad = None


def refuse_half_parameters(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigurationError for trained parameters in float16, however they came to be so."""
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ConfigurationError(
            "trained parameters are in float16, where gradients and their squares overflow or vanish, so that clipping "
            f"is wrong: leave out half() and use precision={' or '.join(PRECISIONS)} (frozen parameters may be in "
            "float16)."
        )


def refuse_optimizer(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    names: Sequence[str],
) -> None:
    """Raise ConfigurationError for an optimizer that misses a trainable parameter, or has one that is not released."""
    released = {id(p) for p in parameters}
    updated = set()
    for p in parameters_of(optimizer):
        updated.add(id(p))
        if p.requires_grad and id(p) not in released:
            raise ConfigurationError(
                "the optimizer updates trainable parameters without a released gradient: freeze them "
                "(requires_grad=False before training), or leave them out of it."
            )
    missed = []
    for name, p in zip(names, parameters, strict=True):
        if id(p) not in updated:
            missed.append(name)
    if missed:
        raise ConfigurationError(
            f"the optimizer does not update {', '.join(missed)}: pass all trainable parameters, or freeze these "
            "(requires_grad=False before training), else they spend budget for nothing."
        )


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]
