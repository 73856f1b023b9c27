"""What an optimizer makes of a release: it moves the parameters to which something was released, and no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpbench.guards._saved import sum_of_bits
from dpbench.guards.guard import Guard
from dpbench.guards.parameters import parameters_of

_VISIBLE = 10  # roundings of a parameter


class FirstUpdate(Guard):
    """Compares the first update of the weights with the release that it follows, and warns.

    Either is private: other parameters move by what is public or released. But an optimizer that decays frozen weights
    changes what was to stay, and one that works on copies spends the budget for nothing.
    """

    name = "first update"
    prevents = "the optimizer updates frozen parameters, or does not update released ones"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._is_due = True
        self._before: list[tuple[Tensor, int | None]] = []

    def on_change(self) -> None:
        """Compare again, since other parameters are trained now."""
        self._is_due = True

    def on_released(self) -> None:
        """Note the parameters as they are before the first update whose learning rates are not zero."""
        optimizer = self.session.optimizer
        if not self._is_due or any(group.get("lr") == 0 for group in optimizer.param_groups):
            return
        self._before = [(p, sum_of_bits(p)) for p in parameters_of(optimizer)]
        self._with_gradient = set()
        for group in optimizer.param_groups:
            self._with_gradient |= {id(p) for p in group["params"] if _would_move(p, float(group.get("lr", 1)))}
        self._is_due = not self._with_gradient

    def on_close(self) -> None:
        """Warn of what has moved without a release, and of what has not moved in spite of one."""
        released = {id(p) for p in self.session.trained.parameters}
        names = {id(p): name for name, p in self.session.training.module.named_parameters()}
        unreleased = []
        still = []
        for p, before in self._before:
            has_moved = sum_of_bits(p) != before
            name = names.get(id(p), f"a parameter of shape {tuple(p.shape)}")
            if has_moved and id(p) not in released:
                unreleased.append(name)
            if not has_moved and id(p) in self._with_gradient:
                still.append(name)
        self._before = []
        kind = type(self.session.optimizer).__name__
        if unreleased:
            self.session.training.warn(
                f"{kind} has changed {', '.join(unreleased)}, for which nothing was released (weight decay of frozen "
                "parameters?): leave frozen parameters out of the optimizer."
            )
        if still and len(still) == len(self._with_gradient):  # of one among others its optimizer may know better
            self.session.training.warn(
                f"{kind} has not changed {', '.join(still)} in its first step, though their released gradients "
                "are not zero: unless later steps change them, they waste privacy budget."
            )

    def on_end(self) -> None:
        """Hold no parameter any longer."""
        self._before = []


def _would_move(p: Tensor, lr: float) -> bool:
    """Whether a plain step by the released gradient is large enough to be seen in the numbers of a parameter."""
    if p.grad is None or not p.grad.numel():
        return False
    step = lr * float(p.grad.abs().max())
    return step > _VISIBLE * torch.finfo(p.dtype).eps * float(p.detach().abs().max())
