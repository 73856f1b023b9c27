"""Segmentation of images: a class for each pixel."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassJaccardIndex

from dpbench.errors import ConfigurationError
from dpbench.modules.supervised import OptimizerMaker, ScheduleMaker, Supervised

_NONE = -100
"""A label that no mask has, as torch's `cross_entropy` writes it."""


class Segmentation(Supervised):
    """Training by the cross-entropy of each pixel; knows nothing of privacy.

    An image's loss is the mean over its pixels, so that each image counts alike. A loss over the pixels of the whole
    lot (such as Dice's over a batch) would couple records, which no clipping bounds.

    Measured is the mean over classes of intersection over union, of all images together.

    Args:
        model: (N, C, H, W) → logits (N, num_classes, H, W).
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        num_classes: Number of classes.
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer; it moves after every step. None: a constant learning rate.
        ignored: Label of pixels that do not count, such as 255 for borders; None: all count.
    """

    objective = "val/mean_iou"
    masks_padding = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        num_classes: int,
        monitored: str = "val",
        schedule: ScheduleMaker | None = None,
        ignored: int | None = None,
    ) -> None:
        metric = MulticlassJaccardIndex(num_classes, ignore_index=ignored)
        super().__init__(model, optimizer, metric, monitored, schedule)
        self._num_classes = num_classes
        self._ignored = _NONE if ignored is None else ignored
        self.record_metrics = {"accuracy": 1, "loss": 1}

    def training_step(
        self,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> dict[str, Any]:
        """Cross-entropy of a lot; the budget does not cover the logged value.

        Args:
            batch: Images (N, C, H, W) and masks (N, H, W), the class of each pixel.
            batch_idx: Unused.
        """
        logits, masks = self._pair(batch)
        counted = masks != self._ignored
        # An image without a counted pixel has loss and gradient zero.
        pixels = counted.flatten(1).sum(1).clamp(min=1)
        losses = F.cross_entropy(logits, masks, reduction="none", ignore_index=self._ignored).flatten(1).sum(1) / pixels

        def accuracy() -> Tensor:
            hits = (logits.argmax(1) == masks) & counted
            return hits.flatten(1).sum(1).to(losses.dtype) / pixels

        return self._result(losses, {"accuracy": accuracy})

    def measure(self, metric: Metric, batch: tuple[Tensor, Tensor]) -> None:
        """Count pixels of each class, of all images together."""
        logits, masks = self._pair(batch)
        metric(logits.argmax(1), masks)

    def _pair(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (N, num_classes, H, W) and masks (N, H, W).

        Raises:
            ConfigurationError: The model or the data give other shapes.
        """
        images, masks = batch
        logits = self(images)
        if logits.shape != (len(masks), self._num_classes, *masks.shape[1:]) or masks.dim() != 3:
            raise ConfigurationError(
                f"the model makes {tuple(logits.shape)} for masks {tuple(masks.shape)}: logits (images, "
                f"{self._num_classes}, height, width) and masks (images, height, width) are needed, as model=unet and "
                "a class for each pixel give."
            )
        return logits, masks.long()
