"""A training as sources of records and guards see it, for every driver."""

from __future__ import annotations

import inspect
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from dpbench.errors import ConfigurationError

TrainingStep = Callable[..., Any]
"""Called with a batch (and its number, where it takes one): the loss, or a dictionary with it."""

_ABSENT = object()


class NotRepeatable(Exception):
    """A step cannot be repeated as kernels; the text ends a sentence that begins with "because"."""


class Training(ABC):
    """A module, its optimizers and its device. A Lightning Trainer (`callback.lightning_training`) or a loop drives it.

    The driver calls `step` and `backward`, as `mount` set them, once for each batch, and the functions of
    `after_zero_grad` and `after_lot` at their moments.

    Args:
        module: Trained: a `torch.nn.Module`, of any kind that the driver knows.

    Attributes:
        module: Trained.
        automatic_optimization: True if the driver calls `backward` and the optimizer; else `step` does so itself.
        rank: Rank of this process.
        world_size: Number of processes.
        should_stop: True if the training ends after this step.
        datamodule: Source of the records, apart from the loader; None: unknown.
        after_zero_grad: Called after hooks by others that run where gradients are cleared: no batch is in sight there.
        after_lot: Called after the last code that sees a batch.
    """

    automatic_optimization = True
    rank = 0
    world_size = 1
    should_stop = False
    datamodule: Any = None

    def __init__(self, module: Any) -> None:
        self.module = module
        self.after_zero_grad: list[Callable[[], None]] = []
        self.after_lot: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[Optimizer]:
        """All optimizers of the training."""

    @property
    def schedulers(self) -> Sequence[Any]:
        """Learning rate schedulers that the driver steps."""
        return ()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the module."""

    @property
    @abstractmethod
    def own_step(self) -> TrainingStep:
        """The training step as its author wrote it."""

    @abstractmethod
    def mount(self, step: TrainingStep, backward: Callable[..., None]) -> None:
        """Have the driver call other functions in the place of the training step and the backward pass."""

    def watch_epochs(self, watched: Callable[[], AbstractContextManager[Any]]) -> None:  # noqa: B027 (others have no hooks)
        """Run hooks of epochs, which come between batches, within a context."""

    def withhold_loss(self, after: Callable[[], None]) -> bool:
        """Keep a batch's loss from code that steps the optimizer itself, and call `after` then; False: none does."""
        return False

    def restore(self) -> None:
        """Give the module back as it was."""
        self.after_zero_grad.clear()
        self.after_lot.clear()

    def to_device(self, batch: Any) -> Any:
        """A batch, where the module is."""
        return batch

    def local_batches(self) -> Callable[[Any], Any]:
        """A function that moves a batch of local training to the device.

        Raises:
            ConfigurationError: The driver knows no local training.
        """
        raise ConfigurationError("PrivateLoop does not support training by user: use a Lightning Trainer.")

    def index_of_step(self) -> tuple[int, ...]:
        """Arguments of `own_step` after the batch, where it is called outside of the driver's loop."""
        parameters = inspect.signature(self.own_step).parameters.values()
        takes_more = any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters)
        return (0,) if takes_more or len(parameters) > 1 else ()

    def largest(self, count: int) -> int:
        """The largest of the counts of all processes."""
        return count

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the training step."""
        return nullcontext()

    @contextmanager
    def without_loggers(self) -> Iterator[None]:
        """Within, loggers are given nothing."""
        yield

    def warn(self, text: str) -> None:
        """Show a warning, on the first process."""
        if self.rank == 0:
            warnings.warn(text, stacklevel=3)

    def inform(self, text: str) -> None:
        """Say something that is no warning, on the first process."""
        if self.rank == 0:
            logging.getLogger(__name__).info(text)


class ReplacedMethods:
    """Methods of one object that are replaced by other functions, until `restore`.

    Args:
        owner: The object; its class stays as it is.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._before: dict[str, Any] = {}

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        """Put a function in the place of a method."""
        attributes = self._owner.__dict__
        self._before.setdefault(name, attributes.get(name, _ABSENT))
        attributes[name] = function

    def restore(self) -> None:
        """Give the methods back."""
        attributes = self._owner.__dict__
        while self._before:
            name, before = self._before.popitem()
            if before is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = before


@contextmanager
def replaced_methods(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Within, functions stand in the places of methods of an object."""
    methods = ReplacedMethods(owner)
    for name, function in functions.items():
        methods.replace(name, function)
    try:
        yield
    finally:
        methods.restore()


def loss_of(output: Any) -> Any:
    """The loss that a training step has returned, by itself or in a dictionary; None: it has returned none.

    Raises:
        ConfigurationError: It has returned something else.
    """
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None or isinstance(loss, Tensor):
        return loss
    raise ConfigurationError(
        f"training_step returned a {type(loss).__name__} as its loss: return the loss tensor, or a dictionary with it "
        'as "loss".'
    )


def masks_padding(module: Any) -> bool:
    """True if a module's own class states that its training step leaves padding out: a subclass states it anew."""
    return bool(vars(type(module)).get("masks_padding", False))


def gathered_alone(world_size: int, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `all_gather`: no process waits for another one's trial."""

    def gathered(x: Any) -> Any:
        return x.expand(world_size, *x.shape) if isinstance(x, Tensor) else x

    return tree_map(gathered, data)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `log`."""
