"""Image classification with any network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from dpbench.losses import per_record
from dpbench.modules.supervised import OptimizerMaker, ScheduleMaker, Supervised


class ImageClassifier(Supervised):
    """Cross-entropy training of a network on labeled images; knows nothing of privacy.

    Args:
        model: (N, C, H, W) → logits (N, num_classes).
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        num_classes: Number of classes.
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer, such as `functools.partial(CosineAnnealingLR, T_max=1000)`; it moves after
            every step. None: a constant learning rate.
        recalls: True to measure the recall of every class, too: `val/recall/0` and so on; 0 without such images.

    Raises:
        ConfigurationError: The model is that of a GAN.
    """

    objective = "val/accuracy"
    masks_padding = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        num_classes: int,
        monitored: str = "val",
        schedule: ScheduleMaker | None = None,
        recalls: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            MulticlassAccuracy(num_classes, average="micro"),
            monitored,
            schedule,
        )
        # Convolutions and pooling are up to twice as fast channels-last; rows of the data lie so already.
        self.model = model.to(memory_format=torch.channels_last)
        self._recalls = MulticlassRecall(num_classes, average=None) if recalls else None
        self.record_metrics = {"accuracy": 1, "loss": 1, "class_counts": num_classes}

    def training_step(
        self,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> dict[str, Any]:
        """Mean cross-entropy of a batch; the budget does not cover the logged value.

        `record_metrics` has one value (or row) for each record, which a private strategy can release with noise.
        """
        images, labels = batch
        logits = self(images)
        losses = per_record(logits, labels)
        return self._result(
            losses,
            {
                "accuracy": lambda: (logits.argmax(1) == labels).to(losses.dtype),
                "class_counts": lambda: F.one_hot(labels, logits.shape[1]).float(),
            },
        )

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of each image, (N,), in double precision: those of well-known images differ by very little."""
        logits: Tensor = self(batch[0])
        return per_record(logits.double(), batch[1])

    def measure(self, metric: Metric, batch: tuple[Tensor, Tensor]) -> None:
        """Count images that are classified correctly."""
        logits = self(batch[0])
        metric(logits, batch[1])
        is_of_validation_or_test = (
            metric is self.val_accuracy or metric is self.test_accuracy
        )  # not a copy, for training records
        if self._recalls is not None and is_of_validation_or_test:
            self._recalls.update(logits, batch[1])

    def on_validation_epoch_end(self) -> None:
        """The recall of every class, if wanted."""
        self._log_recalls(self._monitored)

    def on_test_epoch_end(self) -> None:
        """The recall of every class, if wanted."""
        self._log_recalls("test")

    def _log_recalls(self, data: str) -> None:
        if self._recalls is not None:
            for label, recall in enumerate(self._recalls.compute()):
                self.log(f"{data}/recall/{label}", recall)
            self._recalls.reset()
