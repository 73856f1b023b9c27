"""The configuration that lies in a run's folder, from which the run is resumed."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpbench.errors import ConfigurationError, brief
from dpbench.files import write_atomically
from dpbench.runs.folder import Run, RunFolder

SCHEMA = 1
"""Number of the settings that a run has, its `run.schema`: one more whenever older ones lack some or mean something
else. Runs of before it was written down have none."""


def write_config(run: Run) -> None:
    """Keep the configuration in the run's folder, whole or not at all."""
    write_atomically(run.folder.config, OmegaConf.to_yaml(OmegaConf.create(run.config)))


def require_resumable(folder: RunFolder, longer: bool = False) -> None:
    """Check that a run is there that can be resumed.

    Args:
        folder: Of the run.
        longer: Whether more is asked of it than it was to do: then it may be finished.

    Raises:
        ConfigurationError: The folder holds no run, a finished one, or one with settings of another version.
    """
    config = read_config(folder)
    if folder.result.exists() and not longer:
        raise ConfigurationError(
            f"{folder} holds a finished run, and there is nothing to resume: ask for more (trainer.max_steps=...), or "
            "train a new one."
        )
    schema = config["run"].get("schema") if isinstance(config["run"], dict) else None
    if schema != SCHEMA:
        raise ConfigurationError(
            f"{folder} was begun by another version of dpbench (run.schema is {schema}, not {SCHEMA}), whose settings "
            "this one does not know: resume it with that version, or train a new run."
        )


def read_config(folder: RunFolder) -> dict[str, Any]:
    """The resolved configuration of a run.

    Raises:
        ConfigurationError: The folder holds no run, or its configuration is damaged.
    """
    path = folder.config
    if folder.path.is_file():
        raise ConfigurationError(f"{folder} is a file: name the folder of a run.")
    folder.refuse_misplaced()
    if not path.is_file():
        raise ConfigurationError(f"{folder} holds no run of dpbench ({path} is missing).")
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError, AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # else OmegaConf's, of what is no mapping
            raise
        raise ConfigurationError(f"{path} is damaged: {brief(error)} (restore it; a resume needs it)") from error
    if not isinstance(config, dict) or not {"run", "data", "strategy"} <= set(config):
        raise ConfigurationError(f"{path} is damaged: it holds no settings of a run (restore it; a resume needs it).")
    return {str(key): value for key, value in config.items()}
