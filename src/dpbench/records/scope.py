"""What is private of a module: all of it, or the part that it names, such as the discriminator of a GAN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.records.hidden_records import LotRecords
from dpbench.records.module_writes import Writes
from dpbench.records.optimizer_steps import OptimizerSteps
from dpbench.records.packages import overrides
from dpbench.records.withheld_loss import without_loss

State = dict[str, tuple[Tensor, int]]
"""Name of a tensor → the tensor, and how often it was written to."""


def private_part(pl_module: pl.LightningModule, optimizers: int) -> tuple[nn.Module, str]:
    """Find the private part of a module, and the prefix of its parameters' names.

    Args:
        pl_module: Names it in its attribute `private_module`, or is private as a whole.
        optimizers: How many train it.

    Raises:
        ConfigurationError: There is no such part, it is not named though there are several optimizers, or the module
            uses automatic optimization.
    """
    name = getattr(pl_module, "private_module", None)
    if name is None and optimizers != 1:
        raise ConfigurationError(
            f"the module has {optimizers} optimizers, and a private strategy releases to one. For several "
            "learning rates (backbone and head) make one optimizer with a parameter group each: "
            'torch.optim.SGD([{"params": self.body.parameters(), "lr": 1e-3}, {"params": '
            'self.head.parameters(), "lr": 0.1}]). For a GAN, name the submodule that sees private records in the '
            "module's attribute private_module (the others see only what it says of inputs that are not private)."
        )
    if name is None:
        return pl_module, ""
    try:
        part = pl_module.get_submodule(name)
    except AttributeError:
        raise ConfigurationError(
            f"private_module is {name!r}, but {type(pl_module).__name__} has no such submodule."
        ) from None
    if pl_module.automatic_optimization:
        raise ConfigurationError(
            "private_module needs manual optimization (self.automatic_optimization = False): several networks are "
            "trained, each by its own loss."
        )
    return part, f"{name}."


class _WrappedHooks:
    """Hooks of a LightningModule with something before and after them.

    Args:
        module: Whose hooks; they are replaced on this object alone.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._own: dict[str, Any] = {}

    def wrap(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call `before` and `after` around a hook."""
        hook = getattr(self._module, name)

        def wrapped(*args: Any, **kwargs: Any) -> None:
            before()
            hook(*args, **kwargs)
            after()

        self.replace(name, wrapped)

    def replace(self, name: str, other: Callable[..., None]) -> None:
        """Put another function in the place of a hook."""
        own = self._module.__dict__
        hook = getattr(self._module, name)
        self._own[name] = own.get(name)
        own[name] = functools.wraps(hook)(other)

    def unwrap(self) -> None:
        """Give the hooks back as they were."""
        while self._own:
            name, own = self._own.popitem()
            if own is None:
                self._module.__dict__.pop(name, None)
            else:
                self._module.__dict__[name] = own


class Scope:
    """The private part of a LightningModule, and the optimizer that it is released to.

    A module that trains more than one network names the only one that sees private records in its attribute
    `private_module`. Everything else may be trained on what the private part says of *other* inputs: that is
    post-processing, and is left as it is.

    Args:
        pl_module: Trained.
        trainer: Trains it.

    Attributes:
        part: The private module, `pl_module` itself where it names none.
        prefix: Of its parameters' names in `pl_module`.

    Raises:
        ConfigurationError: There is no such part, it is not named though there are several optimizers, or the module
            uses automatic optimization.
    """

    def __init__(self, pl_module: pl.LightningModule, trainer: Any) -> None:
        self._whole, self._optimizers = pl_module, trainer.optimizers
        self._unchecked, self._unreleased = True, False
        self._hooks: list[RemovableHandle] = []
        self._lot: LotRecords | None = None
        self._steps: OptimizerSteps | None = None
        self._loader: LotLoader | None = None
        self._wrapped = _WrappedHooks(pl_module)
        self._writes = Writes(pl_module, trainer)
        self._gradients: State = {}
        self.part, self.prefix = private_part(pl_module, len(trainer.optimizers))

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        """Return this scope itself: a copy of a watched network is watched by the same."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle nothing of a lot: a network that is saved while it is watched takes no record with it."""
        return {"_unreleased": False, "_lot": None, "_hooks": []}

    def optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Find the optimizer that updates the private part.

        Raises:
            ConfigurationError: See `OptimizerSteps`.
        """
        self._steps = OptimizerSteps(self._optimizers, parameters, self.prefix.rstrip("."))
        return self._steps.private

    def watch(self) -> None:
        """Attach hooks that notice an optimizer that steps too early, records in a public network, and writes."""
        self._hooks = self._optimizer_steps.watch(self._writes, self._after_update)
        public = self._public() if self.prefix else []
        self._hooks += [module.register_forward_pre_hook(self._before_public, with_kwargs=True) for module in public]
        self._wrapped.wrap("on_train_batch_end", _nothing, self._writes.end_lot)
        if self._whole.automatic_optimization:  # in manual optimization no such hook is called
            self._wrapped.wrap("on_before_zero_grad", _nothing, self._writes.remember)
            if overrides(self._whole, "optimizer_step"):
                own = _with_withheld_loss(self._whole.optimizer_step, self._writes.accept_values)
                self._wrapped.replace("optimizer_step", own)

    def follow(self, loader: LotLoader) -> None:
        """Learn from the loader when a lot is drawn: before any hook has seen it."""
        self._loader, loader.before_lot = loader, self._draw_lot

    def close(self) -> None:
        """Remove the hooks: the module's passes are no longer watched."""
        self.close_lot()
        while self._hooks:
            self._hooks.pop().remove()
        self._wrapped.unwrap()
        if self._loader is not None:
            self._loader.before_lot = None
        self._writes.forget()

    def _draw_lot(self) -> None:
        self.refuse_skipped_lot()
        self._writes.draw_lot()

    def open_lot(self, batch: Any) -> None:
        """Begin a lot: private records come in sight of the module."""
        self.refuse_skipped_lot()
        self._unreleased = True
        self._optimizer_steps.open_lot()
        self._gradients = public_gradients(self._whole, self.part)
        self._writes.open_lot()
        if self.prefix:
            self._lot = LotRecords(batch, watched=self._unchecked)

    def refuse_skipped_lot(self) -> None:
        """Raise ConfigurationError where the last lot was not released."""
        if self._unreleased:
            raise ConfigurationError(
                "a lot was drawn, and never released (on_train_batch_start returned -1?): whether a lot is trained on "
                "must not depend on its records, so each one is released, also an empty one. To stop early, set "
                "trainer.should_stop from what is not private."
            )

    def release_lot(self) -> None:
        """Hide the records from other networks; nothing of the module may have kept anything of them.

        Raises:
            UnsupportedModuleError: A tensor, or a gradient of another network, has changed since the lot was drawn.
        """
        self._unreleased = False
        self._optimizer_steps.release_lot()
        self._writes.refuse_before_release()
        _refuse_early_gradients(self._gradients, public_gradients(self._whole, self.part))
        if self._lot is not None:
            self._lot.hide()

    def close_lot(self) -> None:
        """Give the batch back as it was."""
        if self._lot is not None:
            self._lot.show()
            self._lot = None
            self._writes.update()
        self._unreleased = False
        if self._steps is not None:
            self._steps.close_lot()

    def forward(self, training_step: Any) -> Any:
        """Wrap a training step that may write nothing; the hooks before its backward pass, which see no lot, may."""

        @functools.wraps(training_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            self._writes.refuse_before_release()
            return output

        return step

    def in_lot(self, training_step: Any) -> Any:
        """Wrap a training step, so that its batch is as it was when others see it."""

        @functools.wraps(training_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return training_step(*args, **kwargs)
            finally:
                if not self._unreleased:  # else it is refused: no release was made
                    self.close_lot()

        return step

    def refuse_dependence(self, loss: Tensor) -> None:
        """Raise ConfigurationError where a loss after a release depends on the records."""
        if self._lot is not None:
            self._lot.refuse_dependence(loss)
            self._unchecked = False

    @property
    def _optimizer_steps(self) -> OptimizerSteps:
        assert self._steps is not None
        return self._steps

    def _after_update(self) -> None:
        if not self.prefix:  # else other networks follow, which see no record
            self._writes.update()

    def _before_public(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._unreleased and self._lot is not None:
            self._lot.refuse_passage(module, (args, kwargs))
            if torch.is_grad_enabled():
                raise ConfigurationError(
                    f"{type(module).__name__}, part of a network that is not private, ran with gradients before the "
                    "release of the lot: its images would be as many as the records, which is private, and perhaps of "
                    "their classes. Make images for the private step under torch.no_grad(), and train on new ones "
                    "after the release, of a fixed number and of uniform classes."
                )

    def _public(self) -> list[nn.Module]:
        """Networks, and parts of networks, that are trained and see no private record."""
        inside = set(self.part.modules())
        outside = [module for module in self._whole.modules() if module not in inside and not self._holds(module)]
        return [module for module in outside if any(p.requires_grad for p in module.parameters())]

    def _holds(self, module: nn.Module) -> bool:
        return any(one is self.part for one in module.modules())


def _nothing() -> None: ...


def _with_withheld_loss(optimizer_step: Callable[..., None], after: Callable[[], None]) -> Callable[..., None]:
    """A module's own `optimizer_step`, in whose sight neither a lot nor its loss is: it may set learning rates."""

    def step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        closure = optimizer_closure and without_loss(optimizer_closure)
        optimizer_step(epoch, batch_idx, optimizer, closure)
        after()

    return step


def public_gradients(whole: nn.Module, part: nn.Module) -> State:
    """Gradients of the parameters that are not in the private part."""
    if part is whole:
        return {}
    private = {id(p) for p in part.parameters()}
    named = [(name, p) for name, p in whole.named_parameters() if id(p) not in private]
    return {name: (p.grad, p.grad._version) for name, p in named if p.grad is not None}


def _refuse_early_gradients(before: State, now: State) -> None:
    early = [
        name
        for name, (x, version) in now.items()
        if before.get(name, (None,))[0] is not x or before[name][1] != version
    ]
    if early:
        raise UnsupportedModuleError(
            f"gradients of {', '.join(early)} were computed before the release of the lot, perhaps from its "
            "records: call backward for other networks after the private optimizer's step."
        )
