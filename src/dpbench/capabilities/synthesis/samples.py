"""What a generator makes during training: a grid of images, a row for each class."""

from __future__ import annotations

from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchvision.utils import make_grid, save_image

from dpbench.files import replacing
from dpbench.harness.runs.folder import RunFolder
from dpbench.modules.gan import GAN

_SEED = 0  # the same noise each time, so that grids can be compared
PER_CLASS = 10  # images in a row
FRAME = 2  # pixels between them


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


class SampleGrid(pl.Callback):
    """Writes samples.png, and samples/<step>.png, whenever the module is validated, and hands it to loggers of images.

    Generated images are post-processing of what a private discriminator released: they cost nothing. They are those of
    the weights that are validated: with a moving average, of the average.

    The pictures go into the trainer's `default_root_dir`, which is the run's folder. It is added by `module=gan`.
    """

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw what the weights that are validated make."""
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
