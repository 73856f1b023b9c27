"""Networks of a module that are not private: they may learn from the private one, and see no record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.guards._hidden_records import LotRecords
from dpbench.guards.guard import Guard
from dpbench.privacy.record_axis.host import axis_of_step
from dpbench.records.source import ChosenGradients
from dpbench.records.training import Training

_READS = (
    "training_step reads values of records before their release: {event}. The other networks may then depend on them "
    "without noise: keep values in tensors, and pass those that are shown to self.log."
)
_AFTER_RELEASE = (
    "training_step uses a value computed from private records after their release: {event}. It is exact, and the other "
    "networks would learn from it without noise: compute their losses from noise and the released network alone (no "
    "feature matching against real records), and pass tensors to self.log, without item()."
)

State = dict[str, tuple[Tensor, int]]
"""Name of a tensor → the tensor, and how often it was written to."""


def private_part(training: Training) -> nn.Module:
    """The part of a module that sees private records: all of it, unless its attribute `private_module` names one.

    Raises:
        ConfigurationError: There is no such part, it is not named though there are several optimizers, or the module
            uses automatic optimization.
    """
    module: nn.Module = training.module
    name = getattr(module, "private_module", None)
    optimizers = len(training.optimizers)
    if name is None and optimizers != 1:
        raise ConfigurationError(
            f"the module has {optimizers} optimizers, and a private strategy releases to one. For several "
            "learning rates (backbone and head) make one optimizer with a parameter group each: "
            'torch.optim.SGD([{"params": self.body.parameters(), "lr": 1e-3}, {"params": '
            'self.head.parameters(), "lr": 0.1}]). For a GAN, name the submodule that sees private records in the '
            "module's attribute private_module (the others see only its outputs on inputs that are not private)."
        )
    if name is None:
        return module
    try:
        part = module.get_submodule(name)
    except AttributeError:
        raise ConfigurationError(
            f"private_module is {name!r}, but {type(module).__name__} has no such submodule."
        ) from None
    if training.automatic_optimization:
        raise ConfigurationError(
            "private_module needs manual optimization, since each network has its own loss: set "
            "self.automatic_optimization = False."
        )
    return part


class PublicNetworks(Guard):
    """Keeps private records from all but the private part of a module, such as the discriminator of a GAN.

    A module that trains more than one network names the only one that sees private records in its attribute
    `private_module`. Everything else may be trained on outputs of the private part for *other* inputs: that is
    post-processing, and is left as it is.
    """

    name = "public networks"
    prevents = "another network (a generator) sees records or learns from them without noise"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._hooks: list[RemovableHandle] = []
        self._lot: LotRecords | None = None
        self._gradients: State = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PublicNetworks:
        """Return this guard itself: a copy of a watched network is watched by the same."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle nothing of a lot: a network that is saved while it is watched takes no record with it."""
        return {"_lot": None, "_hooks": []}

    def on_attach(self) -> None:
        """Watch the passes of public networks."""
        if self.has_public_networks:
            if not isinstance(self.session.source, ChosenGradients):
                kind = type(self.session.source).__name__
                raise ConfigurationError(f"private_module needs records=examples, not a {kind}.")
            for module in self._public():
                self._hooks.append(module.register_forward_pre_hook(self._before_public, with_kwargs=True))

    def on_open(self, batch: Any) -> None:
        """Give the batch memory of its own."""
        self._gradients = public_gradients(self.session.training.module, self.session.part)
        if self.has_public_networks:
            self._lot = LotRecords(batch)

    def on_release(self) -> None:
        """Hide the records.

        Raises:
            ConfigurationError: Python knows a value of records.
            UnsupportedModuleError: A gradient of another network has changed since the batch was drawn.
        """
        axis = axis_of_step()
        if self.has_public_networks and axis is not None and axis.reads:
            raise ConfigurationError(_READS.format(event=axis.reads[0]))
        gradients = public_gradients(self.session.training.module, self.session.part)
        _refuse_early_gradients(self._gradients, gradients)
        if self._lot is not None:
            self._lot.hide()

    def on_released(self) -> None:
        """Withhold the records from the networks that follow."""
        axis = axis_of_step()
        if self.has_public_networks and axis is not None:
            axis.refusal = _AFTER_RELEASE

    def on_public_loss(self, loss: Tensor) -> None:
        """Raise ConfigurationError where a loss after a release is not finite, perhaps by hidden records."""
        if self._lot is not None:
            self._lot.refuse_hidden(loss)

    def on_stepped(self) -> None:
        """Give the batch back as it was, for hooks that see it later."""
        if self.session.released:  # else it is refused: no release was made
            self._show()

    def on_end(self) -> None:
        """The module's passes are no longer watched."""
        self._show()
        while self._hooks:
            self._hooks.pop().remove()

    def _show(self) -> None:
        if self._lot is not None:
            self._lot.show()
            self._lot = None

    def _before_public(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if self._lot is not None and not self.session.released and torch.is_grad_enabled():
            raise ConfigurationError(
                f"{type(module).__name__}, part of a network that is not private, ran with gradients before the "
                "release of the batch: the number of its images, and perhaps their classes, would be those of the "
                "records. Make images for the private step under torch.no_grad(), and train on new ones after the "
                "release, with a fixed number and uniform classes."
            )

    def _public(self) -> list[nn.Module]:
        """Networks, and parts of networks, that are trained and see no private record."""
        part = self.session.part
        private = set(part.modules())
        public = []
        for module in self.session.training.module.modules():
            holds_private = any(submodule is part for submodule in module.modules())
            is_trained = any(p.requires_grad for p in module.parameters())
            if is_trained and module not in private and not holds_private:
                public.append(module)
        return public


def public_gradients(whole: nn.Module, part: nn.Module) -> State:
    """Gradients of the parameters that are not in the private part."""
    if part is whole:
        return {}
    private = {id(p) for p in part.parameters()}
    gradients: State = {}
    for name, p in whole.named_parameters():
        if id(p) not in private and p.grad is not None:
            gradients[name] = (p.grad, p.grad._version)
    return gradients


def _refuse_early_gradients(before: State, now: State) -> None:
    early = []
    for name, (gradient, version) in now.items():
        gradient_before, version_before = before.get(name, (None, 0))
        if gradient is not gradient_before or version != version_before:
            early.append(name)
    if early:
        raise UnsupportedModuleError(
            f"gradients of {', '.join(early)} were computed before the release of the batch, perhaps from its "
            "records: call backward for other networks after the private optimizer's step."
        )
