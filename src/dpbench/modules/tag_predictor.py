"""Prediction of the tags of texts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MultilabelRecall

from dpbench.errors import DataError
from dpbench.modules.supervised import OptimizerMaker, ScheduleMaker, Supervised

_TOP = 5


class TagPredictor(Supervised):
    """Training by the binary cross-entropy of each tag; knows nothing of privacy.

    A text's loss is the mean over tags, as in the published program of SO-LR.

    Measured is recall@5: of all tags of all texts, the share that is among the five likeliest of its text.

    Args:
        model: (N, num_features) → logits (N, num_tags).
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        num_tags: Number of tags.
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer; it moves after every step. None: a constant learning rate.
        loss_reduction: Reduction of the losses of a batch: "mean", or "sum" as in the published program, for which its
            learning rates were chosen. Where examples are the records, strategy.loss_reduction must say the same.
    """

    objective = "val/recall_at_5"
    masks_padding = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        num_tags: int,
        monitored: str = "val",
        schedule: ScheduleMaker | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            MultilabelRecall(num_tags, average="micro"),
            monitored,
            schedule,
            loss_reduction,
        )
        self.record_metrics = {"recall_at_5": 1, "loss": 1}

    def training_step(
        self,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> dict[str, Any]:
        """Binary cross-entropy of a batch; the budget does not cover the logged value.

        Args:
            batch: Features (N, num_features) and tags (N, num_tags), each 0 or 1.
            batch_idx: Unused.
        """
        logits = self._logits(batch)
        tags = batch[1]
        losses = F.binary_cross_entropy_with_logits(
            logits,
            tags.to(logits.dtype),
            reduction="none",
        ).mean(1)

        def recall() -> Tensor:
            hits = (_likeliest(logits) * tags).sum(1)
            return hits.to(losses.dtype) / tags.sum(1).clamp(min=1)

        return self._result(losses, {"recall_at_5": recall})

    def measure(self, metric: Metric, batch: tuple[Tensor, Tensor]) -> None:
        """Count tags that are found, of all texts together."""
        metric(_likeliest(self._logits(batch)), batch[1].long())

    def _logits(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self(batch[0])
        if logits.shape != batch[1].shape:
            raise DataError(
                f"tags are {tuple(batch[1].shape)}, but the model's logits {tuple(logits.shape)}: give a 0 or 1 for "
                "each text and tag."
            )
        return logits


def _likeliest(logits: Tensor) -> Tensor:
    """One at the five largest logits of each row (N, K), and zero elsewhere; int64."""
    top = logits.topk(min(_TOP, logits.shape[1]), 1).indices
    return torch.zeros_like(logits, dtype=torch.long).scatter_(1, top, 1)
