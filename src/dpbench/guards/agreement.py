"""Agreement of a training's processes on the lots, and on the results of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
from pytorch_lightning.utilities.seed import isolate_rng
from torch import nn

from dpbench.canonical import digest_of
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError

_COMPARED = 64  # records, evenly over the data set


def refuse_other_records(
    trainer: pl.Trainer,
    loader: PrivateDataLoader,
    contents: str | None = None,
) -> None:
    """Refuse processes that have other training records, or the same in another order.

    Each takes its share of a batch by position: a record that two of them have at different positions may enter a sum
    twice, which moves then by twice the sensitivity. Without a hash of the whole set, sizes and some records are
    compared; records that are random (augmented) cannot be.

    Args:
        trainer: Trainer of this process.
        loader: Loader of this process.
        contents: Hash of the training set.

    Raises:
        ConfigurationError: They differ; raised on all processes.
    """
    if trainer.world_size == 1:
        return
    facts: list[str | None] = [repr(loader.lots.sampling)]
    if contents is None:
        facts += _digests(loader.dataset)
    else:
        facts.append(contents)
    facts_of_first: list[str | None] = trainer.strategy.broadcast(facts)
    if not trainer.strategy.reduce_boolean_decision(_agree(facts, facts_of_first), all=True):
        raise ConfigurationError(
            "the processes of this training have different training records, or a different order, so a record may "
            "enter a batch twice: read the same files in the same (sorted) order on every node. If only something else "
            "in the data set differs, name its records: PrivateDataLoader(..., data_id=...)."
        )


def _agree(facts: Sequence[str | None], others: Sequence[str | None]) -> bool:
    """Return whether two processes know the same; a fact that one of them does not know is no difference."""
    if len(facts) != len(others):
        return False
    pairs = zip(facts, others, strict=True)
    known_to_both = [pair for pair in pairs if None not in pair]
    return all(fact == other for fact, other in known_to_both)


def _digests(dataset: Any) -> list[str | None]:
    """A hash of some records; None for one that is another each time, or that cannot be read by itself."""
    last = max(len(dataset) - 1, 0)
    digests: list[str | None] = []
    with isolate_rng():
        for position in np.linspace(0, last, _COMPARED).astype(int).tolist():
            try:
                digest = digest_of(dataset[position])
                is_random = digest != digest_of(dataset[position])
            except Exception:  # its own lot will say so
                is_random = True
            digests.append(None if is_random else digest)
    return digests


def are_alike(module: nn.Module) -> bool:
    """Return whether several processes have the sum of one, except for rounding: not if each draws masks of its own."""
    return not any(map(_drops_out, module.modules()))


def _drops_out(layer: nn.Module) -> bool:
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0
