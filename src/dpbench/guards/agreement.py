"""Whether the processes of one training agree on what a lot is, and on what a step makes of it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError

_LOOKED_AT = 64  # records, evenly over the data set


def refuse_other_records(trainer: pl.Trainer, loader: LotLoader, contents: str | None = None) -> None:
    """Refuse processes that have other training records, or the same in another order.

    Each takes its share of a lot by position: a record that two of them have at different positions may enter a sum
    twice, which moves then by twice the sensitivity. Without a hash of the whole set, sizes and some records are
    compared; records that are random (augmented) cannot be.

    Args:
        trainer: Of this process.
        loader: Of this process.
        contents: Hash of the training set.

    Raises:
        ConfigurationError: On all processes.
    """
    if trainer.world_size == 1:
        return
    digests: list[str | None] = _digests(loader.dataset) if contents is None else [contents]
    own = [repr(loader.lots.sampling), *digests]
    first: list[str | None] = trainer.strategy.broadcast(own)
    same = len(own) == len(first) and all(a == b or None in (a, b) for a, b in zip(own, first, strict=True))
    if not trainer.strategy.reduce_boolean_decision(same, all=True):
        raise ConfigurationError(
            "the processes of this training have other training records, or the same in another order, so that one "
            "record may enter a lot twice: read the same files in the same order (sorted) on every node (or, where "
            "only something else of the data set differs, name its records: LotLoader(..., data_id=...))."
        )


def _digests(dataset: Any) -> list[str | None]:
    """A hash of some records; None for one that is another each time, or that cannot be read by itself."""
    found: list[str | None] = []
    with isolate_rng():
        for position in np.linspace(0, max(len(dataset) - 1, 0), _LOOKED_AT).astype(int).tolist():
            try:
                once, again = (_digest(dataset[position]) for _ in range(2))
            except Exception:  # its own lot will say so
                once, again = "", None
            found.append(once if once == again else None)
    return found


def _digest(record: Any) -> str:
    whole = hashlib.sha256()
    for leaf in tree_leaves(record):
        value = leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else leaf
        whole.update(repr((type(leaf).__name__, getattr(leaf, "shape", None))).encode())
        if isinstance(value, Tensor):
            whole.update(value.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            whole.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return whole.hexdigest()


def are_alike(module: nn.Module) -> bool:
    """Whether several processes sum up what one would, but for rounding: not where each draws masks for its share."""
    return not any(
        (isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0)
        or (isinstance(one, nn.RNNBase | nn.MultiheadAttention) and one.dropout > 0)
        for one in module.modules()
    )
