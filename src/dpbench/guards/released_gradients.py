"""What lies between a release and its update: the optimizer must get the released gradients as they are."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard
from dpbench.guards.withheld_loss import with_closures


class _Gradient(NamedTuple):
    """A released gradient, and how often it was written to."""

    parameter: nn.Parameter
    gradient: Tensor | None
    version: int


class ReleasedGradients(Guard):
    """Released gradients reach the optimizer as they are.

    Hooks of the module and of callbacks run between (`on_before_optimizer_step`, `configure_gradient_clipping`), and
    whatever the training step has kept of its lot is in their sight. A scaling of `p.grad` by the loss of the lot would
    carry the loss into the weights, and nobody can tell that from one by its own norm.
    """

    name = "released gradients"
    prevents = "a hook scales p.grad between the release and the update, perhaps by the loss of the lot"

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
            self._gradients.append(_Gradient(p, p.grad, _version(p.grad)))

    def on_end(self) -> None:
        """End with this optimizer."""
        self._gradients = []
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _with_check(
        self,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any]:
        return with_closures(args, kwargs, self._checked)

    def _checked(self, closure: Any) -> Any:
        def checked(*args: Any, **kwargs: Any) -> Any:
            output = closure(*args, **kwargs)
            for parameter, gradient, version in self._gradients:
                if parameter.grad is not gradient or _version(gradient) != version:
                    raise ConfigurationError(
                        "a hook has changed p.grad between the release and the update (on_before_optimizer_step or "
                        "configure_gradient_clipping, of the module or of a callback after the strategy), where what "
                        "training_step has kept of the lot is in sight: let an optimizer do it, in a step() of its own."
                    )
            return output

        return checked


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
