"""Random inputs from which first bounds are found; they need no budget."""

from __future__ import annotations

from typing import Any

import torch

from dpbench.errors import ConfigurationError
from dpbench.records.training import Training


def noise_batch(training: Training, size: int, generator: torch.Generator) -> Any:
    """Call `noise_batch(size, generator)` of the data module or the module.

    Raises:
        ConfigurationError: Neither has it, or the module makes its updates itself.
    """
    makers = [maker for maker in (training.datamodule, training.module) if hasattr(maker, "noise_batch")]
    if not makers or not training.automatic_optimization:
        raise ConfigurationError(
            "adaptive mean clipping starts from a step on random noise: give the data module (or the module) a "
            "method noise_batch(size, generator), or set initial_max_grad_norm (the only way in manual "
            "optimization, and so for a GAN)."
        )
    return makers[0].noise_batch(size, generator)
