"""Reconstruction of images by an autoencoder."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from dpbench.errors import ConfigurationError
from dpbench.modules.regression import SquaredErrors
from dpbench.modules.supervised import OptimizerMaker, ScheduleMaker


class Reconstruction(SquaredErrors):
    """Training by the mean squared error of an image's pixels; knows nothing of privacy.

    A batch is images (N, C, H, W), alone or before their labels.

    Args:
        model: (N, C, H, W) → pixels (N, C·H·W), or of the images' shape.
        optimizer: Called with the parameters, such as `functools.partial(torch.optim.SGD, lr=0.1)`.
        monitored: Name of the data that the validation loop sees, "val" or "test" (the papers' learning curves).
        schedule: Called with the optimizer; it moves after every step. None: a constant learning rate.
        loss_reduction: Reduction of the losses of a batch: "mean", or "sum" as in the published program, for which its
            learning rates were chosen. Where examples are the records, strategy.loss_reduction must say the same.
    """

    masks_padding = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerMaker,
        monitored: str = "val",
        schedule: ScheduleMaker | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        super().__init__(model, optimizer, MeanSquaredError(), monitored, schedule, loss_reduction)
        self.record_metrics = {"loss": 1}

    def _pair(self, batch: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        """Reconstructed and true pixels, (N, C·H·W) both.

        Raises:
            ConfigurationError: The model makes something else than the images' pixels.
        """
        images = batch if isinstance(batch, Tensor) else batch[0]
        reconstructed = self(images).flatten(1)
        pixels = images.flatten(1)
        if reconstructed.shape != pixels.shape:
            raise ConfigurationError(
                f"the model returns {reconstructed.shape[1]} numbers for images of {pixels.shape[1]} pixels: choose an "
                "autoencoder, such as model=autoencoder."
            )
        return reconstructed, pixels
