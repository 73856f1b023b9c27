"""A module's training step as local training calls it: with a loss each time, and with random numbers of the user."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbench.errors import ConfigurationError

_NO_LOSS = "training_step returned no loss for a batch of a user: always return the loss (or a dictionary with it)."
_NO_STEP = (
    "training_step returned a loss of shape {shape} for a batch of a user, or one that depends on no trainable "
    "parameter: a local step needs one number that does."
)


class LocalStep:
    """Losses of the batches of one user after the other, and the private metrics of each one's first batch.

    Args:
        module: Says in `record_metrics` what metrics it has.
        training_step: Its own.
        options: Further arguments of `training_step`, after the batch.
        measured: Whether there are private metrics.
    """

    def __init__(
        self,
        module: Any,
        training_step: Any,
        options: tuple[Any, ...],
        measured: bool,
    ) -> None:
        self._module = module
        self._step = training_step
        self._options = options
        self._measured = measured
        self._values: Mapping[str, Any] = {}
        self._steps = 0

    def begin(self) -> None:
        """Another user follows."""
        self._values = {}
        self._steps = 0

    def __call__(self, batch: Any) -> Tensor:
        """The loss of a batch.

        Raises:
            ConfigurationError: There is none, or none to descend.
        """
        output = self._step(batch, *self._options)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ConfigurationError(_NO_LOSS)
        if loss.numel() != 1 or not loss.requires_grad:
            raise ConfigurationError(_NO_STEP.format(shape=tuple(loss.shape)))
        self._steps += 1
        if self._measured and self._steps == 1 and isinstance(output, dict):
            metrics = output.get("record_metrics", {})
            self._values = {name: _mean(value) for name, value in metrics.items()}
        return loss

    def values(self) -> Mapping[str, Tensor]:
        """Private metrics of a user: means over the examples of its first local step, before its training."""
        if not self._measured or self._steps:
            return self._values
        zeros = {}  # of a user without examples
        for name, size in getattr(self._module, "record_metrics", {}).items():
            shape = (1,) if size == 1 else (1, size)
            zeros[name] = torch.zeros(shape, device=self._module.device)
        return zeros


def _mean(value: Any) -> Tensor:
    value = value() if callable(value) else value
    mean: Tensor = value.detach().mean(0, keepdim=True)
    return mean


@contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """Leave nothing of the random numbers within: how many were drawn says something of the users."""
    state_of_numpy = np.random.get_state()
    state_of_random = random.getstate()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(state_of_numpy)
        random.setstate(state_of_random)
