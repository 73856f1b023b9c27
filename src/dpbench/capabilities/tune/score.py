"""The score of a trial: a number from 0 to 1 for each record that was held out, measured on it alone."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from dpbench.data.module import PrivateDataModule
from dpbench.errors import ConfigurationError

LOSS = "loss"


def sum_of_scores(
    module: pl.LightningModule,
    data: PrivateDataModule[Any],
    name: str,
    bound: float | None,
) -> float:
    """Sum of the scores of all held-out records, which one record moves by at most 1.

    Each record is measured alone, by the training step in evaluation mode on a copy of the module, so that none sees
    another one or what it left. A record that cannot be read or measured scores 0.

    Args:
        module: The trained module.
        data: Data with held-out records.
        name: A metric of the module's `record_metrics`, or "loss".
        bound: Loss at which the score is 0, falling linearly from 1; None for a metric.
    """
    module.eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return math.fsum(_score(module, batch_of_one, name, bound) for batch_of_one in data.held_out_batches())


def _score(module: pl.LightningModule, batch_of_one: Callable[[], Any], name: str, bound: float | None) -> float:
    try:
        output: Any = copy.deepcopy(module).training_step(batch_of_one(), 0)
        if name == LOSS and bound is not None:
            loss = float(output["loss"] if isinstance(output, dict) else output)
            return _clipped(1 - loss / bound)
        assert isinstance(output, dict)
        values = output["record_metrics"][name]
        values = values() if callable(values) else values
        return _clipped(float(Tensor(values).double().mean()))
    except Exception:  # a refusal here would tell of the record
        return 0.0


def _clipped(score: float) -> float:
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def check_score(module: pl.LightningModule, name: str, bound: float | None) -> None:
    """Refuse scores that a module does not have.

    Args:
        module: The module, before the training.
        name: Name of the score.
        bound: Bound of the loss.

    Raises:
        ConfigurationError: The module has no such metric of one number, or steps its optimizers itself.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(f"{type(module).__name__} steps its optimizers itself: it has no score of a record.")
    if name == LOSS:
        if bound is None:
            raise ConfigurationError("the score loss needs the loss at which it is 0: --score-bound 5, say.")
        return
    sizes = getattr(module, "record_metrics", {})
    metrics = [metric for metric, size in sizes.items() if size == 1 and metric != LOSS]
    if name not in metrics:
        raise ConfigurationError(
            f"{type(module).__name__} has no metric {name!r} of a record; it has {', '.join(metrics) or 'none'}: take "
            "--score loss --score-bound 5, say, or give the module such a metric (record_metrics)."
        )
