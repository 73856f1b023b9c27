"""Random inputs from which first bounds are found: what needs no budget to look at."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch

from dpbench.errors import ConfigurationError


def noise_batch(trainer: pl.Trainer, module: pl.LightningModule, size: int, generator: torch.Generator) -> Any:
    """What `noise_batch(size, generator)` of the data module or the module makes.

    Raises:
        ConfigurationError: Neither has it, or the module makes its updates itself.
    """
    makers = (trainer.datamodule, module)  # type: ignore[attr-defined]
    maker: Any = next((x for x in makers if hasattr(x, "noise_batch")), None)
    if maker is None or not module.automatic_optimization:
        raise ConfigurationError(
            "adaptive mean clipping starts from a step on random noise: give the data module (or the module) a "
            "method noise_batch(size, generator), or set initial_max_grad_norm (the only way in manual "
            "optimization, and so for a GAN)."
        )
    return maker.noise_batch(size, generator)
