"""What is private of a module: all of it, or the part that it names, such as the discriminator of a GAN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dpbench.errors import ConfigurationError
from dpbench.strategies.guards import State, tensors_of


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
        public = {child for child, module in self._whole.named_children() if not self._holds(module)}
        return {name: one for name, one in tensors_of(self._whole).items() if name.partition(".")[0] not in public}

    def _holds(self, module: nn.Module) -> bool:
        """Whether the private part lies in a module, or the module has nothing to train."""
        inside = any(one is self.part for one in module.modules())
        return inside or not any(p.requires_grad for p in module.parameters())


def watch_inputs(batch: Any) -> list[Tensor]:
    """Make the private records visible to autograd, and return them."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf.requires_grad_() for leaf in leaves]


def refuse_private_inputs(loss: Tensor, watched: Sequence[Tensor]) -> None:
    """Raise ConfigurationError where a loss after the release depends on the private records.

    Args:
        loss: Of a network that is not private.
        watched: From `watch_inputs`.
    """
    if not watched or not loss.requires_grad:
        return
    found = torch.autograd.grad(loss, list(watched), torch.ones_like(loss), retain_graph=True, allow_unused=True)
    if any(gradient is not None for gradient in found):
        raise ConfigurationError(
            "the loss of a network that is not private depends on the private records: compute it from noise and the "
            "released network alone (no feature matching against real records)."
        )
