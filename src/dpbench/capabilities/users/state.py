"""State of a module between the local trainings of two users: nothing of one of them may reach the other."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from dpbench.records.step_state import HOOKS, PublicState, StepState
from dpbench.records.training import Training


class UserState(PublicState):
    """State of a module before the local training of a user, to which it returns after it.

    Guarantee: nothing that `StepState` reaches carries facts of one user's examples into another one's update. States
    of torchmetrics begin anew with each user, and are merged.

    Args:
        training: The training; its users are trained one after the other.

    Attributes:
        has_changed: True once a user has changed numbers, tensors or lists that are put back.
        not_merged: Names of classes of metrics with states that cannot be merged: they do not count users' additions.
    """

    def __init__(self, training: Training) -> None:
        self.has_changed = False
        self.not_merged: set[str] = set()
        self._metrics: list[tuple[Any, Any]] = []  # of the module, of all users
        super().__init__(training)
        for metric, _ in self._metrics:
            metric.reset()

    def put_back(self) -> None:
        """Put everything back after a user, gradients and random numbers included."""
        for metric, total in self._metrics:
            if metric.update_called:
                self._merge(metric, total)
        for metric, _ in self._metrics:
            metric.reset()
        has_grown = any(len(container) != size for container, size in self._containers)
        super().put_back()
        self.has_changed |= has_grown or bool(self._changed)
        for undo in self._undo_draws:
            undo()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def close(self) -> None:
        """Give metrics the additions of all users."""
        for metric, total in self._metrics:
            for name in (*total._defaults, "_update_count", "_forward_cache"):
                setattr(metric, name, getattr(total, name))

    def _merge(self, metric: Any, total: Any) -> None:
        try:
            if any(getattr(reduction, "__name__", "") == "dim_zero_mean" for reduction in metric._reductions.values()):
                raise RuntimeError("a mean of states would weight all users equally")
            _detach_states(metric)
            total.merge_state(metric)
        except RuntimeError:
            self.not_merged.add(type(metric).__name__)
            return
        total._update_count += metric.update_count
        total._forward_cache = metric._forward_cache  # the step's own value

    def _roots(self, training: Training) -> list[Any]:
        return StepState._roots(self, training)

    def _keep(self, x: Any) -> Iterable[Any]:
        held = list(super()._keep(x))
        # Where the engine records a step, hooks are its own, whose state has to go on.
        if isinstance(x, nn.Module):
            for name, hooks in vars(x).items():
                if name.endswith(HOOKS) and isinstance(hooks, dict):
                    held += hooks.values()
        return held

    def _keep_metric(self, metric: Any) -> None:
        if hasattr(metric, "merge_state"):  # not of a collection
            total = copy.copy(metric)
            for name in total._defaults:
                setattr(total, name, tree_map(lambda x: x, getattr(metric, name)))  # a list of its own
            self._metrics.append((metric, total))


def _detach_states(metric: Any) -> None:
    for name in metric._defaults:
        setattr(metric, name, tree_map_only(Tensor, Tensor.detach, getattr(metric, name)))
