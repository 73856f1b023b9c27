"""A trained GAN from its run folder, without its data."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from yaml import YAMLError

from dpbench.errors import ConfigurationError
from dpbench.modules.gan import GAN, SHAPE
from dpbench.training.build import module_for
from dpbench.training.run import CHECKPOINT, CONFIG

_PIECE = 1000  # images made at once


def load_gan(run: Path) -> tuple[GAN, dict[str, Any]]:
    """The module of a run's last checkpoint (never of a better one), in evaluation mode, and the configuration.

    Args:
        run: Folder.

    Raises:
        ConfigurationError: It holds no run, no generator, no checkpoint, or one of another architecture.
    """
    if not (run / CONFIG).is_file():
        raise ConfigurationError(f"{run} holds no run of dpbench ({run / CONFIG} is missing).")
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(run / CONFIG), resolve=True)
        target = config.get("module", {}).get("_target_")
    except (YAMLError, OmegaConfBaseException, AttributeError) as error:
        raise ConfigurationError(f"{run / CONFIG} is damaged: {str(error).splitlines()[0]}") from error
    if target is None or not issubclass(get_class(target), GAN):
        raise ConfigurationError(f"{run} holds no generator: train one with module=gan model=conv_gan.")
    if not (run / CHECKPOINT).is_file():
        raise ConfigurationError(f"{run} has no checkpoint yet: {run / CHECKPOINT} is missing.")
    try:
        state = torch.load(run / CHECKPOINT, map_location="cpu", weights_only=False)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigurationError(f"{run / CHECKPOINT} cannot be read: {str(error).splitlines()[0]}") from error
    try:
        module = module_for(config, **state[SHAPE])
        module.load_state_dict(state["state_dict"])
    except (KeyError, RuntimeError) as error:
        raise ConfigurationError(
            f"{run / CHECKPOINT} is of another architecture than {run / CONFIG} says: {str(error).splitlines()[0]}"
        ) from error
    assert isinstance(module, GAN)
    return module.eval(), config


def make(module: GAN, number: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Images, every class as often as the others (frequencies of the training data are private).

    Args:
        module: From `load_gan`.
        number: Of images.
        seed: Of the noise; the same seed gives the same images.

    Returns:
        uint8 (N, C, H, W), and labels (N,) where the generator knows classes.

    Raises:
        ConfigurationError: The seed is out of range.
    """
    if not 0 <= seed < 2**63:
        raise ConfigurationError(f"--seed must lie between 0 and 2^63 - 1, not {seed}.")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % module.num_classes
    parts = [(255 * module.sample(part, generator)).round().byte().cpu() for part in torch.split(labels, _PIECE)]
    return torch.cat(parts), labels if module.classes else None
