"""Images from a GAN's generator: a grid during the training, any number afterwards."""

from __future__ import annotations

from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchvision.utils import make_grid, save_image

from dpbench.errors import ConfigurationError
from dpbench.files import replacing
from dpbench.harness.runs.folder import RunFolder
from dpbench.modules.gan import GAN
from dpbench.modules.image_generator import ImageGenerator

_SEED = 0  # the same noise each time, so that grids can be compared
PER_CLASS = 10  # images in a row
FRAME = 2  # pixels between them
_IMAGES_AT_ONCE = 1000
_MOST_IMAGES = 10_000_000
_DISTANCES_AT_ONCE = 250  # images, whose distances to all others are in memory together


def grid(module: GAN, per_class: int = PER_CLASS) -> Tensor:
    """Images of every class (of none, if the generator knows none), shape (3, height, width), in [0, 1]."""
    labels = torch.arange(module.num_classes).repeat_interleave(per_class)
    images = module.sample(labels, torch.Generator().manual_seed(_SEED))
    drawn: Tensor = make_grid(
        images.cpu(),
        nrow=per_class,
        padding=FRAME,
        pad_value=1.0,
    )
    return drawn


def write_grid(images: Tensor, path: Path) -> None:
    """Write a grid as PNG, atomically."""
    with replacing(path) as new:
        save_image(images, new, format="png")


def sample_images(module: ImageGenerator, number: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Sample images, every class as often as the others (frequencies of the training data are private).

    Args:
        module: A trained generator.
        number: Number of images.
        seed: Seed of the noise; the same seed gives the same images.

    Returns:
        uint8 (N, C, H, W), and labels (N,) where the generator knows classes.

    Raises:
        ConfigurationError: The number or the seed is out of range, or the values are not finite.
    """
    if not 1 <= number <= _MOST_IMAGES:
        raise ConfigurationError(
            f"--num-samples must lie between 1 and {_MOST_IMAGES:,} images, not {number} (for more, use several seeds)."
        )
    if not 0 <= seed < 2**63:
        raise ConfigurationError(f"--seed must lie between 0 and 2^63 - 1, not {seed}.")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % module.num_classes
    parts = []
    for part in torch.split(labels, _IMAGES_AT_ONCE):
        images = module.sample(part, generator)
        if not images.isfinite().all():
            raise ConfigurationError("the generated images are not finite: the training has diverged.")
        parts.append((255 * images).round().byte().cpu())
    return torch.cat(parts), labels if module.classes else None


def nearest(images: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Euclidean distance of each image to its nearest neighbor among others, and the neighbor's index, both (N,).

    Args:
        images: (N, ...).
        others: (M, ...).
    """
    points = images.flatten(1)
    other_points = others.flatten(1)
    places = torch.cat([torch.cdist(part, other_points).argmin(1) for part in torch.split(points, _DISTANCES_AT_ONCE)])
    # By subtraction: the products by which many distances are fast leave rounding errors where images are the same.
    distances = torch.linalg.vector_norm(points - other_points[places], dim=1)
    return distances, places


class SampleGrid(pl.Callback):
    """Writes samples.png, and samples/<step>.png, whenever the module is validated, and hands it to loggers of images.

    Generated images are post-processing of a private discriminator's releases: they cost nothing. They come from the
    weights that are validated: with a moving average, from the average.

    The pictures go into the trainer's `default_root_dir`, which is the run's folder. It is added by `module=gan`.
    """

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw images from the weights that are validated."""
        if isinstance(pl_module, GAN) and trainer.is_global_zero and not trainer.sanity_checking:
            self._draw(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the grid of the weights with which the training ends."""
        self.on_validation_epoch_start(trainer, pl_module)

    def _draw(self, trainer: pl.Trainer, module: GAN) -> None:
        images = grid(module)
        folder = RunFolder(Path(trainer.default_root_dir))
        folder.samples_by_step.mkdir(exist_ok=True)
        for path in (folder.samples_by_step / f"{trainer.global_step:07}.png", folder.samples):
            write_grid(images, path)
        for logger in trainer.loggers:
            if hasattr(logger, "log_image"):
                logger.log_image("samples", [images], step=trainer.global_step)
