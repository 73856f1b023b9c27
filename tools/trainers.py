"""Lightning as tools use it: nothing is printed, nothing is written but what callbacks write."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.strategies import DDPStrategy


def trainer_for(folder: Path, callbacks: Sequence[pl.Callback], steps: int, devices: int = 1) -> pl.Trainer:
    """A trainer on CPUs that leaves nothing but what its callbacks do, and never validates.

    Args:
        folder: Default folder of callbacks.
        callbacks: The private strategy, and others.
        steps: Number of steps.
        devices: Number of processes.
    """
    return pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(process_group_backend="gloo") if devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        use_distributed_sampler=False,
        limit_val_batches=0,
        default_root_dir=str(folder),
        callbacks=list(callbacks),
    )


def quiet() -> None:
    """One thread, so that rounding is the same each time, and nothing printed."""
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning_fabric", "lightning.fabric", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
