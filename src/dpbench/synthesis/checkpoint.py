"""A trained GAN from its run folder, without its data."""

from __future__ import annotations

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.modules.gan import GAN
from dpbench.modules.image_generator import SHAPE
from dpbench.run.saved_config import read_config
from dpbench.run.saved_module import SavedModule, last_checkpoint, load_module, require_module
from dpbench.runs.folder import RunFolder

_PIECE = 1000  # images made at once
_MOST = 10_000_000  # images


def load_gan(run: RunFolder, trust: bool = False) -> SavedModule:
    """A run's generator, with where it comes from.

    Args:
        run: Folder.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Raises:
        ConfigurationError: It holds no run, no generator, no checkpoint, one of another architecture, or one that holds
            objects and is not trusted.
    """
    require_module(run, read_config(run), GAN, "holds no generator: train one with module=gan model=conv_gan.")
    checkpoint = last_checkpoint(run, trust)
    if SHAPE not in checkpoint:
        raise ConfigurationError(f"{run.checkpoint} is of another architecture than {run.config} says: no generator's.")
    return load_module(run, checkpoint)


def make(module: GAN, number: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Images, every class as often as the others (frequencies of the training data are private).

    Args:
        module: From `load_gan`.
        number: Of images.
        seed: Of the noise; the same seed gives the same images.

    Returns:
        uint8 (N, C, H, W), and labels (N,) where the generator knows classes.

    Raises:
        ConfigurationError: The number or the seed is out of range, or what was made are no images.
    """
    if not 1 <= number <= _MOST:
        raise ConfigurationError(
            f"--num-samples must lie between 1 and {_MOST:,} images, not {number} (more: with other seeds)."
        )
    if not 0 <= seed < 2**63:
        raise ConfigurationError(f"--seed must lie between 0 and 2^63 - 1, not {seed}.")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % module.num_classes
    parts = []
    for part in torch.split(labels, _PIECE):
        images = module.sample(part, generator)
        if not images.isfinite().all():
            raise ConfigurationError("the generator makes values that are not finite: its training has diverged.")
        parts.append((255 * images).round().byte().cpu())
    return torch.cat(parts), labels if module.classes else None
