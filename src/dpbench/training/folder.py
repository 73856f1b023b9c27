"""The configuration that lies in a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpbench.errors import ConfigurationError, brief

CONFIG = "config.yaml"


def read_config(run: Path) -> dict[str, Any]:
    """The resolved configuration of a run.

    Raises:
        ConfigurationError: The folder holds no run, or its configuration is damaged.
    """
    path = run / CONFIG
    if not path.is_file():
        raise ConfigurationError(f"{run} holds no run of dpbench ({path} is missing).")
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError, AttributeError, OSError) as error:
        raise ConfigurationError(f"{path} is damaged: {brief(error)} (restore it; a resume needs it)") from error
    if not isinstance(config, dict) or not {"run", "data", "strategy"} <= set(config):
        raise ConfigurationError(f"{path} is damaged: it holds no settings of a run (restore it; a resume needs it).")
    return {str(key): value for key, value in config.items()}
