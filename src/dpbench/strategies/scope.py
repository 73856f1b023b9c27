"""What is private of a module: all of it, or the part that it names, such as the discriminator of a GAN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from dpbench.data.lots import LotLoader
from dpbench.data.octaves import is_checked
from dpbench.errors import ConfigurationError
from dpbench.strategies.attached import refuse_unreleased_step
from dpbench.strategies.guards import (
    State,
    refuse_early_gradients,
    refuse_early_step,
    refuse_early_training,
    refuse_skipped_lot,
)
from dpbench.strategies.lot_records import LotRecords
from dpbench.strategies.written import Saved, refuse_forward_writes, refuse_late_writes


class Scope:
    """The private part of a LightningModule, and the optimizer that it is released to.

    A module that trains more than one network names the only one that sees private records in its attribute
    `private_module`. Everything else may be trained on what the private part says of *other* inputs: that is
    post-processing, and is left as it is.

    Args:
        pl_module: Trained.
        optimizers: All of them.

    Attributes:
        part: The private module, `pl_module` itself where it names none.
        prefix: Of its parameters' names in `pl_module`.

    Raises:
        ConfigurationError: There is no such part, it is not named though there are several optimizers, or the module
            uses automatic optimization.
    """

    def __init__(self, pl_module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        name = getattr(pl_module, "private_module", None)
        self._whole, self._optimizers = pl_module, optimizers
        self._unchecked, self._unreleased = True, False
        self._due = False
        self._hooks: list[RemovableHandle] = []
        self._lot: LotRecords | None = None
        self._private: Optimizer | None = None
        self._loader: LotLoader | None = None
        self._wrapped: dict[str, Any] = {}
        self._lots = 0
        self._gradients: State = {}
        self._before: Saved | None = None  # as of when the lot was drawn
        self._updated: Saved | None = None  # as of its update
        self.part: nn.Module = pl_module
        self.prefix = ""
        if name is None and len(optimizers) != 1:
            raise ConfigurationError(
                f"the module has {len(optimizers)} optimizers, and a private strategy releases to one. For several "
                "learning rates (backbone and head) make one optimizer with a parameter group each: "
                'torch.optim.SGD([{"params": self.body.parameters(), "lr": 1e-3}, {"params": '
                'self.head.parameters(), "lr": 0.1}]). For a GAN, name the submodule that sees private records in the '
                "module's attribute private_module (the others see only what it says of inputs that are not private)."
            )
        if name is None:
            return
        try:
            self.part, self.prefix = pl_module.get_submodule(name), f"{name}."
        except AttributeError:
            raise ConfigurationError(
                f"private_module is {name!r}, but {type(pl_module).__name__} has no such submodule."
            ) from None
        if pl_module.automatic_optimization:
            raise ConfigurationError(
                "private_module needs manual optimization (self.automatic_optimization = False): several networks are "
                "trained, each by its own loss."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Scope:
        """Itself: a copy of a watched network is watched by the same."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a network that is saved while it is watched takes no record with it."""
        return {"_unreleased": False, "_lot": None, "_hooks": []}

    def optimizer(self, parameters: Sequence[Tensor]) -> Optimizer:
        """The one that updates the private part.

        Raises:
            ConfigurationError: The private part belongs to no or to several optimizers, or shares one.
        """
        private = {id(p) for p in parameters}
        held = [(o, {id(p) for group in o.param_groups for p in group["params"]}) for o in self._optimizers]
        own = [(o, ids) for o, ids in held if ids & private]
        if len(own) != 1 or (self.prefix and own[0][1] - private):
            raise ConfigurationError(
                f"{self.prefix.rstrip('.') or 'the module'} needs exactly one optimizer, which updates nothing else."
            )
        self._private = own[0][0]
        return own[0][0]

    def watch(self) -> None:
        """Notice any optimizer that steps too early, records that enter a network that is not private, and writes."""
        self._hooks = [register_optimizer_step_post_hook(self._after_step)]
        public = self._public() if self.prefix else []
        self._hooks += [module.register_forward_pre_hook(self._before_public, with_kwargs=True) for module in public]
        self._wrap("on_train_batch_end", _nothing, self._end_lot)
        if self._whole.automatic_optimization:  # in manual optimization no such hook is called
            self._wrap("on_before_zero_grad", _nothing, self._remember)

    def follow(self, loader: LotLoader) -> None:
        """Know when lots come in sight: before any hook has seen one."""
        self._loader, loader.before_lot, loader.lots.attended = loader, self._draw_lot, True

    def _wrap(self, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        hook = getattr(self._whole, name)

        @functools.wraps(hook)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            before()
            hook(*args, **kwargs)
            after()

        self._wrapped[name] = self._whole.__dict__.get(name)
        self._whole.__dict__[name] = wrapped

    def close(self) -> None:
        """Notice no longer."""
        self.close_lot()
        while self._hooks:
            self._hooks.pop().remove()
        while self._wrapped:
            name, own = self._wrapped.popitem()
            if own is None:
                self._whole.__dict__.pop(name, None)
            else:
                self._whole.__dict__[name] = own
        if self._loader is not None:
            self._loader.before_lot, self._loader.lots.attended = None, False
        self._before = self._updated = None

    def _draw_lot(self) -> None:
        self.refuse_skipped_lot()
        self._lots += 1
        self._remember()

    def _remember(self) -> None:
        self._before = Saved(self._whole, contents=is_checked(self._lots))

    def open_lot(self, batch: Any) -> None:
        """Private records come in sight of the module."""
        self.refuse_skipped_lot()
        self._unreleased, self._updated = True, None
        self._gradients = self._public_gradients()
        if self._before is None:
            self._remember()
        if self.prefix:
            self._lot = LotRecords(batch, watched=self._unchecked)

    def refuse_skipped_lot(self) -> None:
        """Raise ConfigurationError where the last lot was not released."""
        refuse_skipped_lot(self._unreleased)

    def release_lot(self) -> None:
        """They go out of sight of other networks; nothing of the module may have kept anything of them.

        Raises:
            UnsupportedModuleError: A tensor, or a gradient of another network, has changed since the lot was drawn.
        """
        self._unreleased, self._due = False, True
        self._refuse_forward_writes()
        refuse_early_gradients(self._gradients, self._public_gradients())
        if self._lot is not None:
            self._lot.hide()

    def _refuse_forward_writes(self) -> None:
        if self._before is not None:
            refuse_forward_writes(self._before)

    def _end_lot(self) -> None:
        """After the last hook that sees the lot."""
        if self._updated is not None:
            refuse_late_writes(self._updated)
        self._before = self._updated = None

    def close_lot(self) -> None:
        """The batch is as it was."""
        if self._lot is not None:
            self._lot.show()
            self._lot = None
            self._settle()
        self._unreleased = False

    def _settle(self) -> None:
        self._updated = Saved(self._whole, contents=is_checked(self._lots))

    def forward(self, training_step: Any) -> Any:
        """A training step that writes nothing; the hooks between it and its backward pass, which see no lot, may."""

        @functools.wraps(training_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            self._refuse_forward_writes()
            return output

        return step

    def in_lot(self, training_step: Any) -> Any:
        """A training step whose batch is as it was when others see it."""

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

    def _public_gradients(self) -> State:
        """Of parameters that are not private; none without a `private_module`."""
        if not self.prefix:
            return {}
        private = {id(p) for p in self.part.parameters()}
        named = [(name, p) for name, p in self._whole.named_parameters() if id(p) not in private]
        return {name: (p.grad, p.grad._version) for name, p in named if p.grad is not None}

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        refuse_early_step(self._unreleased)
        if optimizer is self._private:
            refuse_unreleased_step(self._due)
            self._due = False
            if not self.prefix:  # else other networks follow, which see no record
                self._settle()

    def _before_public(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._unreleased and self._lot is not None:
            self._lot.refuse_passage(module, (args, kwargs))
            refuse_early_training(module)

    def _public(self) -> list[nn.Module]:
        """Networks, and parts of networks, that are trained and see no private record."""
        inside = set(self.part.modules())
        outside = [module for module in self._whole.modules() if module not in inside and not self._holds(module)]
        return [module for module in outside if any(p.requires_grad for p in module.parameters())]

    def _holds(self, module: nn.Module) -> bool:
        return any(one is self.part for one in module.modules())


def _nothing() -> None: ...
