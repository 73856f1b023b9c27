"""Local training of one user's copy of the model by the module's own step, and its update: server minus client."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.options import NonNegative, Positive, PositiveInt, check_options
from dpbench.records.training import loss_of

_NO_LOSS = "training_step returned no loss for a batch of a user: always return the loss (or a dictionary with it)."
_NO_STEP = (
    "training_step returned a loss of shape {shape} for a batch of a user, or one that depends on no trainable "
    "parameter: a local step needs one number that does."
)


@dataclass(frozen=True)
class LocalTraining:
    """How a user trains: plain SGD on its own examples, from the server's weights (FedAvg, McMahan et al. 2017).

    With any of these, a user's update is clipped as a whole: none of them enters the guarantee.

    Attributes:
        lr: Client learning rate.
        batch_size: Examples in a local step; None: all of a user's at once, which with one epoch is FedSGD.
        epochs: Passes over a user's examples, each in a new order.
        max_steps: Most local steps of a user in a round; None: no limit.
        prox_mu: μ of FedProx (Li et al. 2020), which adds μ/2·‖client − server‖² to the local loss; 0: FedAvg.
        max_examples: Most examples of a user in a round, drawn at random. Epsilon is the same without it; but it bounds
            the time of a round, which no noise covers and which tells of a very large user. None: all.

    Raises:
        ConfigurationError: A value is out of range.
    """

    lr: Positive = 0.1
    batch_size: PositiveInt | None = 20
    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    prox_mu: NonNegative = 0.0
    max_examples: PositiveInt | None = None

    def __post_init__(self) -> None:
        # A script makes this object by itself: there is no other place where its options would be checked.
        for name, value in check_options(LocalTraining, vars(self)).items():
            object.__setattr__(self, name, value)  # as plain numbers, where they were NumPy's
        if self.prox_mu * self.lr > 1:
            raise ConfigurationError(
                f"lr={self.lr} times prox_mu={self.prox_mu} is more than 1: each local step would overshoot the "
                "server's weights. Lower one of them."
            )

    def examples_of(self, size: int) -> int:
        """Number of examples that a user with `size` of them goes through in a round.

        >>> LocalTraining(batch_size=20, epochs=2, max_steps=4).examples_of(50)
        70
        """
        if self.max_examples is not None:
            size = min(size, self.max_examples)
        if not size or self.max_steps is None:
            return size * self.epochs
        batch_size = self.batch_size or size
        steps_of_epoch = -(-size // batch_size)  # rounded up
        epochs, steps = divmod(self.max_steps, steps_of_epoch)
        if epochs >= self.epochs:
            return size * self.epochs
        return size * epochs + min(batch_size * steps, size)

    def steps(self, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Positions of the examples of each local step.

        Args:
            size: Number of examples that the user has.
            generator: Generator of the user in this round.
        """
        chosen = torch.randperm(size, generator=generator)[: self.max_examples]
        batch_size = self.batch_size or max(len(chosen), 1)
        count = 0
        for _ in range(self.epochs):
            order = chosen[torch.randperm(len(chosen), generator=generator)]
            for positions in torch.split(order, batch_size):
                if not len(positions) or count == self.max_steps:
                    return
                count += 1
                yield positions


class Client:
    """Weights of a client, next to those of the server, on which one user after the other trains.

    The module is the same object for both: within `weights()` its parameters show the client's.

    Args:
        parameters: The server's trainable parameters.
        training: How clients train.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], training: LocalTraining) -> None:
        self._parameters = list(parameters)
        self._training = training
        self._client = [p.detach().clone() for p in self._parameters]
        self._server: list[Tensor] = []

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Show the client's weights in the module; the server's come back untouched, also after an error."""
        self._server = [p.data for p in self._parameters]  # an optimizer may have replaced them
        try:
            self._show(self._client)
            yield
        finally:
            self._show(self._server)
            self._server = []

    def _show(self, weights: Sequence[Tensor]) -> None:
        for p, weight in zip(self._parameters, weights, strict=True):
            p.data = weight

    def update(self, loss_of: Callable[[Any], Tensor], batches: Iterable[Any]) -> list[Tensor]:
        """Train from the server's weights, within `weights()`.

        Args:
            loss_of: Function from a batch to its loss.
            batches: Batches of the local steps, one after the other.

        Returns:
            Server minus client for each parameter, in its shape: the gradient that the server's optimizer descends.
        """
        client = self._client
        server = self._server
        training = self._training
        parameters = []
        weights = []
        for p, weight in zip(self._parameters, client, strict=True):
            if p.requires_grad:
                parameters.append(p)
                weights.append(weight)
        torch._foreach_copy_(client, server)  # tensors that require no gradient, as in all that follows
        for batch in batches:
            with torch.enable_grad():
                loss = loss_of(batch)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            if training.prox_mu:  # w − ημ(w − w_server), before the gradient at the same w
                torch._foreach_lerp_(client, server, training.lr * training.prox_mu)
            moved = []
            descents = []
            for weight, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    moved.append(weight)
                    descents.append(gradient.to_dense() if gradient.is_sparse else gradient)
            if moved:
                torch._foreach_add_(moved, descents, alpha=-training.lr)
        return list(torch._foreach_sub(_at_least_single(server), _at_least_single(client)))


def _at_least_single(tensors: list[Tensor]) -> list[Tensor]:
    """Convert tensors in bfloat16 to float32: their norms would be too coarse to clip by."""
    single = torch.float32.itemsize
    return [x.float() if x.dtype.itemsize < single else x for x in tensors]


class LocalStep:
    """Losses of the batches of one user after the other, and the private metrics of each one's first batch.

    Args:
        module: The module, with its metrics in `record_metrics`.
        training_step: The module's own step.
        options: Further arguments of `training_step`, after the batch.
        measured: True if there are private metrics.
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
        self.begin()

    def begin(self) -> None:
        """Begin another user."""
        self._values: Mapping[str, Any] = {}
        self._steps = 0

    def __call__(self, batch: Any) -> Tensor:
        """The loss of a batch.

        Raises:
            ConfigurationError: There is none, or none to descend.
        """
        output = self._step(batch, *self._options)
        loss: Tensor | None = loss_of(output)
        if loss is None:
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
