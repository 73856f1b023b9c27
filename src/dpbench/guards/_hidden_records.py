"""A batch's private records, and how they are kept from networks that are not private."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpbench.errors import ConfigurationError


class LotRecords:
    """The tensors of a batch: of use up to the release, out of reach between the release and the end of the batch.

    A batch gets memory of its own, which is overwritten at the release: with NaN, whole numbers with the largest of
    their kind. So views of the records that were made before, and graphs that hold them, say nothing either. The
    tensors of the batch have no rows then, because their number is private too.

    Args:
        batch: Tensors in lists, tuples and dictionaries, and nothing else.

    Raises:
        ConfigurationError: The batch holds something that is no tensor.
    """

    def __init__(self, batch: Any) -> None:
        leaves = tree_leaves(batch)
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise ConfigurationError(
                    "with private_module a batch must consist of tensors (in lists, tuples and dictionaries), not a "
                    f"{type(leaf).__name__}, which cannot be hidden from the other networks."
                )
        self._tensors = [leaf for leaf in leaves if leaf.dim()]  # others are no records
        self._values = [x.data for x in self._tensors]
        for x in self._tensors:
            x.data = x.data.clone()

    def hide(self) -> None:
        """Overwrite the records of the batch; tensors of the data set stay."""
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

    def refuse_hidden(self, loss: Tensor) -> None:
        """Raise ConfigurationError for a loss after the release that is not finite."""
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
