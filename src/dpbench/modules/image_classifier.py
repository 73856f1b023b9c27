"""Image classification with any network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

from dpbench.errors import ConfigurationError


class ImageClassifier(pl.LightningModule):
    """Cross-entropy training of a network on labeled images; knows nothing of privacy.

    Args:
        model: (N, C, H, W) → logits (N, num_classes).
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        num_classes: Number of classes.
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer, such as `functools.partial(CosineAnnealingLR, T_max=1000)`; it moves after
            every step. None: a constant learning rate.

    Raises:
        ConfigurationError: The model is that of a GAN.
    """

    objective = "val/accuracy"
    """The metric by which a sweeper chooses, where records are held out and the user names none."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        num_classes: int,
        monitored: str = "val",
        schedule: Callable[[Optimizer], LRScheduler] | None = None,
    ) -> None:
        super().__init__()
        if hasattr(model, "generator"):
            raise ConfigurationError("the model is a generator and a discriminator: add module=gan.")
        self._monitored = monitored
        # Convolutions and pooling are up to twice as fast channels-last; rows of the data lie so already.
        self.model = model.to(memory_format=torch.channels_last)
        self._make_optimizer, self._make_schedule = optimizer, schedule
        self.record_metrics = {"accuracy": 1, "loss": 1, "class_counts": num_classes}
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images (N, C, H, W)."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """Mean cross-entropy of a lot; the budget does not cover the logged value.

        `record_metrics` has one value (or row) for each record: what a private strategy can release with noise.
        """
        images, labels = batch
        logits = self(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        loss = losses.mean()
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if len(labels) and (self.trainer.global_step + 1) % max(every, 1) == 0:
            self.log("nonprivate/train_loss", loss.detach(), prog_bar=True, batch_size=len(labels))
        record_metrics = {  # functions: nobody pays for what is not released
            "accuracy": lambda: (logits.argmax(1) == labels).to(losses.dtype),
            "loss": lambda: losses,
            "class_counts": lambda: F.one_hot(labels, logits.shape[1]).float(),
        }
        return {"loss": loss, "record_metrics": record_metrics}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy on the monitored data."""
        self.val_accuracy(self(batch[0]), batch[1])
        self.log(f"{self._monitored}/accuracy", self.val_accuracy, prog_bar=True, batch_size=len(batch[1]))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy on test data."""
        self.test_accuracy(self(batch[0]), batch[1])
        self.log("test/accuracy", self.test_accuracy, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        """The optimizer over all trainable parameters, and its schedule."""
        optimizer = self._make_optimizer(p for p in self.parameters() if p.requires_grad)
        if self._make_schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self._make_schedule(optimizer), "interval": "step"}]
