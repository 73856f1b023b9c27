"""The module of a run that was trained, from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import pytorch_lightning as pl

from dpbench.errors import ConfigurationError
from dpbench.run.build import module_for
from dpbench.runs.folder import RunFolder
from dpbench.runs.readers import read_checkpoint


def last_checkpoint(run: RunFolder, trust: bool = False) -> dict[str, Any]:
    """What a run saved last (never a better one).

    Args:
        run: Folder.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Raises:
        ConfigurationError: There is none, it is damaged, or holds objects and is not trusted.
    """
    if not run.checkpoint.is_file():
        raise ConfigurationError(f"{run} has no checkpoint yet: {run.checkpoint} is missing.")
    return read_checkpoint(run.checkpoint, trust=trust)


def trained_module(
    run: RunFolder, config: dict[str, Any], options: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> pl.LightningModule:
    """A run's module with the weights of its checkpoint.

    Args:
        run: Folder, for the error.
        config: Of the run.
        options: What the data say of themselves, such as the shape of a record.
        checkpoint: From `last_checkpoint`.

    Raises:
        ConfigurationError: The checkpoint is of another architecture.
    """
    module = module_for(config, dict(options))
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{run.checkpoint} is of another architecture than {run.config} says: "
            f"{shorten(str(error), 300, placeholder=' …')}"
        ) from error
    return module
