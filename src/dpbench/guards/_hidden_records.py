"""A lot's private records, and how they are kept from networks that are not private."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbench.errors import ConfigurationError


class LotRecords:
    """The tensors of a batch: of use up to the release, out of reach between the release and the end of the lot.

    A lot gets memory of its own, which is overwritten at the release: with NaN, whole numbers with the largest of their
    kind. So views of the records that were made before, and graphs that hold them, say nothing either. The tensors of
    the batch have no rows then, because their number is private too.

    Args:
        batch: Tensors in lists, tuples and dictionaries, and nothing else.
        watched: Whether to let autograd follow them, so that `reach` knows what was computed from them.

    Raises:
        ConfigurationError: The batch holds something that is no tensor.
    """

    def __init__(self, batch: Any, watched: bool) -> None:
        leaves = tree_leaves(batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ConfigurationError(
                    f"the batch holds a {type(leaf).__name__}, which cannot be hidden from networks that are not "
                    "private: with private_module a batch is made of tensors (in lists, tuples and dictionaries)."
                )
        self._tensors = [leaf for leaf in leaves if leaf.dim()]  # others are no records
        self._values = [x.data for x in self._tensors]
        for x in self._tensors:
            x.data = x.data.clone()
        self._watched: dict[int, Tensor] = {}
        if watched:
            for x in self._tensors:
                if x.is_floating_point() and not x.requires_grad:
                    self._watched[id(x)] = x.requires_grad_()

    def hide(self) -> None:
        """Overwrite the records of the lot; what the data set keeps is left alone."""
        for x in self._tensors:
            data = x.data
            if _is_whole(x):
                data.fill_(torch.iinfo(x.dtype).max)
            else:
                data.fill_(math.nan)
            x.data = data.new_empty((0, *x.shape[1:]))

    def show(self) -> None:
        """Give the batch its records back; may be called again."""
        for x, value in zip(self._tensors, self._values, strict=True):
            x.data = value
        for x in self._watched.values():
            x.requires_grad_(False)

    def reach(self, value: Tensor) -> bool:
        """Whether a tensor was computed from watched records, as far as autograd knows."""
        seen = set()
        pending = [value.grad_fn]
        while pending:
            node: Any = pending.pop()
            if node is None or node in seen:
                continue
            if id(getattr(node, "variable", None)) in self._watched:
                return True
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
        return id(value) in self._watched

    def refuse_passage(self, module: object, inputs: Any) -> None:
        """Raise ConfigurationError where watched records enter a network that is not private."""
        if not self._watched:
            return
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if any(map(self.reach, tensors)):
            raise ConfigurationError(
                f"private records enter {type(module).__name__}, part of a network that is not private (it could keep "
                "statistics of them): let only the private_module see records."
            )

    def refuse_dependence(self, loss: Tensor) -> None:
        """Raise ConfigurationError where a loss after the release depends on the records."""
        if self.reach(loss):
            raise ConfigurationError(
                "the loss of a network that is not private depends on the private records: compute it from noise and "
                "the released network alone (no feature matching against real records)."
            )
        if not loss.isfinite().all():
            raise ConfigurationError(
                "the loss of a network that is not private is not finite: it diverged, or it uses the private records, "
                "which are hidden (no rows, NaN) once their batch is released. Compute it from noise and the released "
                "network alone."
            )


def _is_whole(x: Tensor) -> bool:
    if x.dtype == torch.bool:
        return False
    return not x.is_floating_point() and not x.is_complex()
