"""Images from a generator network: a trained GAN without its discriminator."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from dpbench.errors import ConfigurationError

SHAPE = "dpbench.gan"
"""Key in a checkpoint: input_shape and num_classes."""
_BLOCK = 16  # torch.randn fills so many numbers at a time: whole blocks do not depend on how many follow


class ImageGenerator(pl.LightningModule):
    """A generator network, and images that it makes of noise; base of modules that train one.

    Args:
        generator: Noise (N, noise_size) and labels (N,) or None → images (N, *image_shape) in [−1, 1].
        num_classes: Number of classes of the data.
    """

    def __init__(self, generator: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.generator = generator
        network: Any = generator
        self.num_classes = num_classes
        self.classes = network.classes
        self._noise_size = network.noise_size

    def check_data(self, data: pl.LightningDataModule) -> None:
        """Raise ConfigurationError where records are no pixels in [−1, 1], as it draws, or are random views."""
        if getattr(data, "scale", "symmetric") != "symmetric":
            raise ConfigurationError("a generator's pixels lie in [-1, 1]: leave data.scale=symmetric.")
        if getattr(data, "features", None) is not None:
            raise ConfigurationError("a generator makes pixels: leave data.features=null.")
        views = getattr(data, "augmentations", None)
        if views is not None:
            raise ConfigurationError(
                f"data.augmentations={views} crops and mirrors images, which a generator would learn to draw: remove "
                "it."
            )

    def _draw(self, number: int) -> tuple[Tensor, Tensor | None]:
        noise = torch.randn(number, self._noise_size, device=self.device)
        return noise, torch.randint(self.classes, (number,), device=self.device) if self.classes else None

    def _fake_images(self, number: int, labels: Tensor | None) -> Tensor:
        """An image for each record of this process's share of the batch; the same whatever the number of processes."""
        rank = self.trainer.global_rank
        world = self.trainer.world_size
        rows = -(-world * (number + 1) // _BLOCK) * _BLOCK
        noise = torch.randn(rows, self._noise_size, device=self.device)[rank::world][:number]
        return self._generate(noise, labels)

    @torch.no_grad()
    def _generate(self, noise: Tensor, labels: Tensor | None) -> Tensor:
        """Images in [−1, 1], each a function of its own noise alone."""
        before = self.generator.training
        self.generator.eval()
        try:
            images: Tensor = self.generator(noise, labels)
            return images
        finally:
            self.generator.train(before)

    def sample(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Images (N, C, H, W) in [0, 1].

        Args:
            labels: Classes (N,); only their number matters to an unconditional GAN.
            generator: Generator of the noise, on the CPU.
        """
        noise = torch.randn(len(labels), self._noise_size, generator=generator, dtype=torch.float32)
        parameter = next(self.generator.parameters())  # of another precision, perhaps
        images = self._generate(noise.to(parameter), labels.to(parameter.device) if self.classes else None)
        return (images.float() + 1) / 2

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the shapes that sampling without the data needs."""
        networks: Any = self.generator
        checkpoint[SHAPE] = {"input_shape": tuple(networks.image_shape), "num_classes": self.num_classes}
