"""A training step up to its backward pass: in manual optimization it would make the update itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from dpbench.records.training import Training, replaced_methods


class _Reached(BaseException):
    """The step has come to its backward pass."""

    def __init__(self, loss: Tensor) -> None:
        self.output = loss


def stop(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Stand in for `manual_backward`: the loss is all that is wanted."""
    raise _Reached(loss)


def output_of(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a step, or the loss that it gives to `stop`."""
    try:
        return step(*args, **kwargs)
    except _Reached as reached:
        return reached.output


@contextmanager
def stopped(training: Training) -> Iterator[None]:
    """Within, `output_of` a step in manual optimization is its first loss; nothing is updated or left switched off.

    Optimizers are toggled before a backward pass: which parameters ask for gradients is put back.
    """
    if training.automatic_optimization:
        yield
        return
    module = training.module
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    toggled = dict(module._param_requires_grad_state)
    try:
        with replaced_methods(module, manual_backward=stop):
            yield
    finally:
        module._param_requires_grad_state = toggled
        for parameter, requires_grad in flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
