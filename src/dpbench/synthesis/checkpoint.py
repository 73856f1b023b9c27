"""A trained GAN from its run folder, without its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpbench.errors import ConfigurationError, brief
from dpbench.modules.gan import GAN
from dpbench.modules.image_generator import SHAPE
from dpbench.run.config import class_of
from dpbench.run.saved_config import read_config
from dpbench.run.saved_module import last_checkpoint, trained_module
from dpbench.runs.folder import RunFolder

_PIECE = 1000  # images made at once
_MOST = 10_000_000  # images


@dataclass(frozen=True)
class Trained:
    """What the last checkpoint of a run holds (never a better one).

    Attributes:
        module: In evaluation mode.
        config: Of the run.
        checkpoint: As saved.
    """

    module: GAN
    config: dict[str, Any]
    checkpoint: dict[str, Any]


def load_gan(run: RunFolder, trust: bool = False) -> Trained:
    """A run's generator, with where it comes from.

    Args:
        run: Folder.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Raises:
        ConfigurationError: It holds no run, no generator, no checkpoint, one of another architecture, or one that holds
            objects and is not trusted.
    """
    config = read_config(run)
    try:
        module_class = class_of(config["module"], "module")
    except (ConfigurationError, AttributeError, KeyError) as error:
        raise ConfigurationError(f"{run.config} is damaged: {brief(error)}") from error
    if not issubclass(module_class, GAN):
        raise ConfigurationError(f"{run} holds no generator: train one with module=gan model=conv_gan.")
    state = last_checkpoint(run, trust)
    if SHAPE not in state:
        raise ConfigurationError(f"{run.checkpoint} is of another architecture than {run.config} says: no generator's.")
    module = trained_module(run, config, state[SHAPE], state)
    assert isinstance(module, GAN)
    return Trained(module.eval(), config, state)


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
