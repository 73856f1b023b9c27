"""`dpbench check`: the verdict on the training step of a configuration."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig

from dpbench.callback.check import StepCheck, check
from dpbench.harness.run import build
from dpbench.harness.run._earlier_stage import weights_before, with_earlier_stage
from dpbench.harness.run.command_line import without_hydra
from dpbench.harness.run.progress import bars, quiet
from dpbench.harness.runs.folder import RunFolder


def check_step(cfg: DictConfig) -> StepCheck:
    """Make data and module as a training would, and check the step on the first batches.

    Args:
        cfg: The composed configuration, which is checked.

    Raises:
        ConfigurationError: A training would not begin, or its first step would fail.
    """
    quiet()
    config = with_earlier_stage(build.plain(without_hydra(cfg)))
    with tempfile.TemporaryDirectory() as folder:
        strategy = build.build_strategy(config, RunFolder(Path(folder)))
        data = build.build_data(config, strategy)
        pl.seed_everything(config["seed"], verbose=False)
        module = build.build_module(config, data, weights_before(config, trust=False))
        # Callbacks of users may write files.
        trainer = build.build_trial_trainer(config, folder, bars(config["trainer"], show=False))
        records = getattr(strategy, "records", None)
        loss_reduction: Any = getattr(strategy, "loss_reduction", "mean")
        return check(module, data, records, loss_reduction, trainer)
