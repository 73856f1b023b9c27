"""What is private of a module: all of it, or the part that it names, such as the discriminator of a GAN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpbench.errors import ConfigurationError
from dpbench.strategies.guards import State, refuse_early_step, tensors_of
from dpbench.strategies.lot_records import LotRecords


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
        self._hooks: list[RemovableHandle] = []
        self.part: nn.Module = pl_module
        self.prefix = ""
        if name is None and len(optimizers) != 1:
            raise ConfigurationError(
                f"the module has {len(optimizers)} optimizers, and a private strategy releases to one: name the "
                "submodule that sees private records in the module's attribute private_module (the others see only "
                "what it says of inputs that are not private)."
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
        """Itself: a copy of a watched network or optimizer is watched by the same."""
        return self

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
        return own[0][0]

    def tensors(self) -> State:
        """What the forward pass must not write to: everything but networks that see no private record."""
        if not self.prefix:
            return tensors_of(self._whole)
        public = self._public()
        return {name: one for name, one in tensors_of(self._whole).items() if name.partition(".")[0] not in public}

    def watch(self) -> None:
        """Notice optimizers that step too early, and records that enter a network that is not private."""
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in self._optimizers]
        if self.prefix:
            public = [module for child in self._public().values() for module in child.modules()]
            self._hooks += [module.register_forward_pre_hook(self._before_public) for module in public]

    def close(self) -> None:
        """Notice no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def open_lot(self, batch: Any) -> None:
        """Private records come in sight."""
        self._lot = LotRecords(batch, watched=bool(self.prefix) and self._unchecked)
        self._unreleased = True

    def release_lot(self) -> None:
        """They go out of sight of the other networks."""
        self._unreleased = False
        if self.prefix:
            self._lot.hide()

    def close_lot(self) -> None:
        """The batch is as it was."""
        self._lot.show()

    def refuse_dependence(self, loss: Tensor) -> None:
        """Raise ConfigurationError where the first loss after a release depends on the records."""
        if self._unchecked:
            self._lot.refuse_dependence(loss)
            self._unchecked = False

    def _after_step(self, *_: Any) -> None:
        refuse_early_step(self._unreleased)

    def _before_public(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._unreleased:
            self._lot.refuse_passage(module, inputs)

    def _public(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self._whole.named_children() if not self._holds(module)}

    def _holds(self, module: nn.Module) -> bool:
        """Whether the private part lies in a module, or the module has nothing to train."""
        inside = any(one is self.part for one in module.modules())
        return inside or not any(p.requires_grad for p in module.parameters())
