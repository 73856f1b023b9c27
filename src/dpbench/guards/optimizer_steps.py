"""Steps of a training's optimizers: the private one makes a step on each release, and sees nothing else of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.guards.parameters import parameters_of
from dpbench.guards.withheld_loss import RecordsWithheld, has_closure, require_watched, step_arguments


def _writes_before_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may write to its state before it asks for the loss; torch's do not, except one."""
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


def private_optimizer(
    optimizers: Sequence[Optimizer],
    parameters: Sequence[Tensor],
    part: str,
) -> Optimizer:
    """Find the optimizer that updates the private part of a module.

    Args:
        optimizers: Optimizers of the training.
        parameters: Parameters with released gradients.
        part: Name of the private part, for messages; empty where all of the module is private.

    Raises:
        ConfigurationError: The private part belongs to no or to several optimizers, or shares one; or the steps of its
            optimizer cannot be watched.
    """
    released = {id(p) for p in parameters}
    private = []
    updates_others = False
    for optimizer in optimizers:
        updated = {id(p) for p in parameters_of(optimizer)}
        if updated & released:
            private.append(optimizer)
            updates_others = bool(updated - released)
    if len(private) != 1 or (part and updates_others):
        raise ConfigurationError(f"{part or 'the module'} needs exactly one optimizer, which updates nothing else.")
    if isinstance(private[0], SparseAdam):
        raise ConfigurationError("SparseAdam needs sparse gradients, and noise makes all dense: use torch.optim.Adam.")
    require_watched(private[0])
    return private[0]


class ModuleWrites(Protocol):
    """Writes to a module and its optimizers since a batch was drawn."""

    def remember(self) -> None:
        """Accept the writes up to now."""

    def refuse_before_release(self) -> None:
        """Refuse writes before the release."""

    def refuse_before_update(self) -> None:
        """Refuse writes between the release and the update."""


class OptimizerSteps:
    """Watches the steps of all optimizers while a training runs.

    Args:
        optimizer: Optimizer of the private part.
        parameters: Parameters with released gradients.

    Attributes:
        goes_on: True where the module's `optimizer_step` goes on after the step, up to `end_step`.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self.private = optimizer
        self.follow(parameters)
        self._unreleased = False
        self._due = False
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        self._withheld = RecordsWithheld()
        self.goes_on = False

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Take note of the parameters to which gradients are released from now on."""
        self._released = {id(p) for p in parameters}

    def watch(self, writes: ModuleWrites, on_update: Callable[[], None]) -> None:
        """Attach the hooks.

        Args:
            writes: Writes to the module and the optimizers. Those of the private optimizer before it calls the closure
                follow from released gradients, and are accepted.
            on_update: Called after each step of the private optimizer.
        """
        self._writes = writes
        self._on_update = on_update
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        self._withheld.close()
        while self._handles:
            self._handles.pop().remove()

    def open_lot(self) -> None:
        """Begin a lot: no optimizer may step before its release."""
        self._unreleased = True
        self._depth = 0

    def release_lot(self) -> None:
        """Allow one step of the private optimizer, on the coming release.

        Raises:
            UnsupportedModuleError: It would also move parameters to which nothing is released.
        """
        for p in parameters_of(self.private):
            if p.grad is not None and id(p) not in self._released:
                raise UnsupportedModuleError(
                    f"a frozen parameter of shape {tuple(p.shape)} has a gradient, with which the optimizer would "
                    "change it without noise: leave frozen parameters out of the optimizer, and their p.grad None."
                )
        self._unreleased = False
        self._due = True

    def close_lot(self) -> None:
        """End a batch; its records are out of sight."""
        self._unreleased = False

    def end_step(self) -> None:
        """Show records again: the module's `optimizer_step` has returned."""
        self._withheld.close()

    def _before_step(
        self,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any] | None:
        """Hand no loss of private records to an optimizer; the losses of other networks are theirs."""
        before = None
        after = None
        if optimizer is self.private:
            self._depth += 1
            before = self._withheld.close
            after = self._refuse_writes
            if self._unreleased and _writes_before_closure(optimizer):
                if self._depth == 1:  # else it is the step of a base class: what was written since is the optimizer's
                    self._writes.refuse_before_release()
                before = self._let_in
        elif not self._unreleased:
            return None
        arguments = step_arguments(args, kwargs, before, after)
        if optimizer is self.private and (not self._unreleased or has_closure(args, kwargs)):
            self._withheld.open()
        return arguments

    def _refuse_writes(self) -> None:
        """Refuse writes by hooks between the release and the update, which sees no records."""
        self._withheld.open()
        if self._due:
            self._writes.refuse_before_update()

    def _let_in(self) -> None:
        """Accept the optimizer's writes before it asks for the loss."""
        self._withheld.close()
        if self._unreleased:
            self._writes.remember()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is self.private and self._depth == 1 and not self.goes_on:
            self._withheld.close()
        if self._unreleased:
            raise ConfigurationError(
                "an optimizer stepped before the release of the batch: for each batch, first call manual_backward and "
                "self.optimizers()….step() for the private network (steps that bypass Lightning, such as "
                "optimizer.optimizer.step(), are not private), then update other networks. A subclass of the strategy "
                "that overrides a hook must call super()'s."
            )
        if optimizer is not self.private:
            return
        self._depth -= 1
        if self._depth > 0:  # the step of a base class, within its own
            return
        if not self._due:
            raise ConfigurationError(
                "the private optimizer stepped twice on one release, or without one: each release allows one step. (A "
                "subclass of the strategy that overrides a hook must call super()'s.)"
            )
        self._due = False
        self._on_update()
