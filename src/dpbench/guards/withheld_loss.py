"""The stand-in for a batch's loss, which is exact: an optimizer updates by released gradients alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from dpbench.errors import ConfigurationError
from dpbench.privacy.record_axis.operators import tensors_among
from dpbench.privacy.record_axis.tags import is_of_records

READS_LOSS = (
    "the optimizer reads the loss of a batch (as Polyak step sizes such as SPS, LBFGS and line searches do), which is "
    "exact and would get into the weights without noise: use one that reads only p.grad (SGD, Adam, Prodigy, "
    "schedule-free ones), and log the loss in training_step, not the return value of optimizer.step."
)
READS_RECORDS = (
    "the update reads a tensor that training_step computed from records ({function}): it is exact, and would get into "
    "the weights without noise. In private training, optimizers, their hooks and schedules may use only released "
    "gradients, weights and constants."
)
Closure = Callable[..., Any]
"""Function that `Optimizer.step` calls for the loss."""
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of `Optimizer.step`."""

_HARMLESS = (bool, int, str, type(None))


class _WithheldLoss(Tensor):
    """A tensor that may be handed on and returned, as optimizers do with `loss = closure()`; any other use is refused.

    Without data (on the meta device), so that nothing can be read around `__torch_function__` either.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise ConfigurationError(READS_LOSS)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # for tracebacks and debuggers
        return "<withheld loss>"

    def __round__(self, digits: int | None = None) -> NoReturn:
        raise ConfigurationError(READS_LOSS)


class RecordsWithheld(TorchFunctionMode):
    """Refuses functions of tensors that have records in their memory, as tags say: for the time of an update.

    Args:
        refuses: False to let them through.

    Attributes:
        has_seen: True once there was such a function.
    """

    def __init__(self, refuses: bool = True) -> None:
        super().__init__()
        self.has_seen = False
        self._is_open = False
        self._looks = False
        self._refuses = refuses

    def open(self) -> None:
        """Look at functions from now on."""
        self._looks = True
        if not self._is_open:
            self._is_open = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Look no longer."""
        if self._is_open and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self._is_open = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._looks and any(map(is_of_records, tensors_among(args, kwargs))):
            self.has_seen = True
            self._looks = False  # once is enough; after a refusal, the training ends by an error
            if self._refuses:
                raise ConfigurationError(READS_RECORDS.format(function=getattr(func, "__name__", func)))
        return func(*args, **kwargs)


@contextmanager
def records_withheld(refuses: bool = True) -> Iterator[RecordsWithheld]:
    """Within, functions of tensors of records are refused, or noted."""
    withheld = RecordsWithheld(refuses)
    withheld.open()
    try:
        yield withheld
    finally:
        withheld.close()


WITHHELD_LOSS: Tensor = torch.empty((), device="meta").as_subclass(_WithheldLoss)


def without_loss(
    closure: Closure,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Closure:
    """The same closure, which hands out no loss (None stays None), with something called before and after it."""

    def withheld(*args: Any, **kwargs: Any) -> Tensor | None:
        if before is not None:
            before()
        loss = closure(*args, **kwargs)
        if after is not None:
            after()
        return None if loss is None else WITHHELD_LOSS

    return withheld


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if arguments of `Optimizer.step` (the optimizer first) have a closure among them."""
    return callable(kwargs.get("closure")) or (len(args) > 1 and callable(args[1]))


def step_arguments(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> StepArguments:
    """Arguments of `Optimizer.step` from which nothing of a batch can be read.

    Args:
        args: The optimizer, then perhaps the closure, and more.
        kwargs: Perhaps the closure, and more.
        before: Called before each call of the closure.
        after: Called after it.

    Raises:
        ConfigurationError: An argument other than the closure could be computed from records; flags, whole numbers
            and strings pass.
    """
    optimizer, *positional = args
    values = {f"argument {place}": value for place, value in enumerate(positional, 1)}
    values |= kwargs
    for place, (name, value) in enumerate(values.items()):
        may_be_closure = place == 0 or name == "closure"
        is_closure = may_be_closure and callable(value)
        if not is_closure and not isinstance(value, _HARMLESS):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step gets {name} ({type(value).__name__}) in addition to a closure: "
                "values that training_step computes from a batch are exact, and would get into the weights without "
                "noise. In private training, optimizers may use only the released p.grad."
            )
        if is_closure:
            values[name] = without_loss(value, before, after)
    positional = [values[f"argument {place}"] for place in range(1, len(args))]
    return (optimizer, *positional), {name: values[name] for name in kwargs}


def require_watched(optimizer: Any) -> None:
    """Make sure that the hooks of an optimizer's step are called, also where its `__init__` has not seen to it.

    Raises:
        ConfigurationError: It is none of torch's kind, so that its steps cannot be watched.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer, so it cannot be checked what its "
            "step reads: derive it from torch.optim.Optimizer."
        )
    Optimizer.__setstate__(optimizer, {})
