"""The gradients between a release and its update: the optimizer must get them as they were released."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard
from dpbench.guards.withheld_loss import step_arguments

_CHANGED_BY_HOOK = (
    "a hook of {name} (register_hook, register_post_accumulate_grad_hook) changes its gradient, where values kept from "
    "the batch are accessible: hooks may only read released gradients. To freeze, use requires_grad_(False); to keep "
    "rows of a weight fixed, restore them in on_before_zero_grad."
)


class _Gradient(NamedTuple):
    """A released gradient, and how often it was written to."""

    parameter: nn.Parameter
    gradient: Tensor | None
    version: int


class ReleasedGradients(Guard):
    """Released gradients reach the optimizer as they are.

    Hooks of the module and of callbacks run between (`on_before_optimizer_step`, `configure_gradient_clipping`),
    and they see all that the training step has kept of its batch. A scaling of `p.grad` by its loss would carry the
    loss into the weights, and cannot be told from one by its own norm. Hooks of parameters see the released
    gradients, and nothing else, and may not change them either.
    """

    name = "released gradients"
    prevents = "a hook scales p.grad between release and update, perhaps by the loss of the batch"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._gradients: list[_Gradient] = []
        self._handle: RemovableHandle | None = None

    def on_attach(self) -> None:
        """Look at the gradients again when the optimizer's closure returns."""
        self._handle = self.session.optimizer.register_step_pre_hook(self._with_check)

    def on_released(self) -> None:
        """Remember the gradients that were just released."""
        self._gradients = []
        for p in self.session.trained.parameters:
            gradient = p.grad
            self._gradients.append(_Gradient(p, gradient, -1 if gradient is None else gradient._version))
        self._show_to_hooks()

    def on_end(self) -> None:
        """End with this optimizer."""
        self._gradients = []
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _show_to_hooks(self) -> None:
        """Call the hooks of the parameters, which were not called for gradients of records."""
        for name, (parameter, gradient, version) in zip(self.session.trained.names, self._gradients, strict=True):
            if gradient is None:
                continue
            returned = [hook(gradient) for hook in list((parameter._backward_hooks or {}).values())]
            for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                hook(parameter)
            is_same = parameter.grad is gradient and gradient._version == version
            if not is_same or any(x is not None and x is not gradient for x in returned):
                raise ConfigurationError(_CHANGED_BY_HOOK.format(name=name))

    def _with_check(
        self,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any]:
        return step_arguments(args, kwargs, after=self._refuse_changed)

    def _refuse_changed(self) -> None:
        with torch._C.DisableTorchFunction():  # modes of torch need not see this look
            for parameter, gradient, version in self._gradients:
                if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                    raise ConfigurationError(
                        "a hook changed p.grad between the release and the update (on_before_optimizer_step or "
                        "configure_gradient_clipping, of the module or of a callback after the strategy), where values "
                        "kept from the batch are accessible: let an optimizer do it, in its own step()."
                    )
