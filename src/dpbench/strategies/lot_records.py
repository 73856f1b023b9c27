"""A lot's private records, and how they are kept from networks that are not private."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbench.errors import ConfigurationError


class LotRecords:
    """The tensors of a batch: of use up to the release, out of reach between the release and the end of the lot.

    Hidden records are NaN, whole numbers the largest of their kind, which no embedding or loss takes for a class. So
    what is computed from them after the release says nothing about them, whoever computes it.

    Args:
        batch: Tensors in lists, tuples and dictionaries.
        watched: Whether to let autograd follow them, so that `refuse_dependence` sees them.
    """

    def __init__(self, batch: Any, watched: bool) -> None:
        self._tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._watched = {id(x.requires_grad_()) for x in self._tensors if x.is_floating_point()} if watched else set()
        self._values: list[Tensor] = []

    def hide(self) -> None:
        """Put nothing in the place of the records; the memory that they lie in is left alone."""
        self._values = [x.data for x in self._tensors]
        for x in self._tensors:
            nothing = torch.iinfo(x.dtype).max if _is_whole(x) else float("nan")
            x.data = x.new_full((), nothing, requires_grad=False).expand(x.shape)

    def show(self) -> None:
        """Undo `hide`."""
        for x, value in zip(self._tensors, self._values, strict=bool(self._values)):
            x.data = value

    def reach(self, value: Tensor) -> bool:
        """Whether a tensor was computed from watched records, as far as autograd knows."""
        seen, found = set(), [value.grad_fn]
        while found:
            node: Any = found.pop()
            if node is None or node in seen:
                continue
            if id(getattr(node, "variable", None)) in self._watched:
                return True
            seen.add(node)
            found += [following for following, _ in node.next_functions]
        return id(value) in self._watched

    def refuse_passage(self, module: object, inputs: tuple[Any, ...]) -> None:
        """Raise ConfigurationError where watched records enter a network that is not private; a forward pre-hook."""
        if self._watched and any(isinstance(x, Tensor) and self.reach(x) for x in tree_leaves(inputs)):
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
                "the loss of a network that is not private is not finite. If it uses the private records: they are "
                "hidden (NaN) once their lot is released, so compute it from noise and the released network alone."
            )


def _is_whole(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
