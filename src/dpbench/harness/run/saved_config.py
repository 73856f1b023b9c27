"""The configuration in a run's folder, from which the run is resumed."""

from __future__ import annotations

import sys
from copy import deepcopy
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpbench.code import targets_of
from dpbench.errors import ConfigurationError, brief
from dpbench.files import write_atomically
from dpbench.harness.runs.folder import Run, RunFolder

_MOVED = "dpbench.moved"
"""Group of entry points: earlier paths of classes, which the configurations of older runs name."""
SCHEMA = 1
"""Version of the settings of a run, its `run.schema`: raised when settings are added or change their meaning. The
oldest runs have none."""


def write_config(run: Run) -> None:
    """Write the configuration to the run's folder, whole or not at all."""
    write_atomically(run.folder.config, OmegaConf.to_yaml(OmegaConf.create(run.config)))


def require_resumable(folder: RunFolder, longer: bool = False) -> None:
    """Check that a run is there that can be resumed.

    Args:
        folder: The run's folder.
        longer: True if it is to become longer than configured: then it may be finished.

    Raises:
        ConfigurationError: The folder holds no run, a finished one, or one with settings of another version.
    """
    config = read_config(folder)
    if folder.result.exists() and not longer:
        raise ConfigurationError(
            f"{folder} holds a finished run, and there is nothing to resume: raise trainer.max_steps, or "
            "train a new one."
        )
    schema = config["run"].get("schema") if isinstance(config["run"], dict) else None
    if schema != SCHEMA:
        raise ConfigurationError(
            f"{folder} was started by an incompatible version of dpbench (run.schema is {schema}, not {SCHEMA}): "
            "resume it with that version, or train a new run."
        )


def read_config(folder: RunFolder) -> dict[str, Any]:
    """Read the resolved configuration of a run, which may be another user's.

    Raises:
        ConfigurationError: The folder holds no run, its configuration is damaged, or would run code of the folder.
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
    directives = config.keys() & {"hydra", "defaults"}  # Hydra would obey them
    if directives:
        raise ConfigurationError(
            f"{path} sets {max(directives)}, which dpbench never writes and which could execute arbitrary code: remove "
            "it."
        )
    _refuse_code_of(folder, config)
    return with_later_options({str(key): value for key, value in config.items()})


def with_later_options(config: dict[str, Any]) -> dict[str, Any]:
    """Add today's options to a saved configuration, with values for the behavior before they existed.

    Args:
        config: A run's configuration as read from its file.
    """
    config = deepcopy(config)
    groups = {name: group for name, group in config.items() if isinstance(group, dict)}
    engine, strategy, data = (groups.get(name, {}) for name in ("engine", "strategy", "data"))
    if engine.pop("triton", "off") != "off":  # a plug-in now
        engine["kernels"] = "triton"
    if strategy.get("bands") is None or strategy.get("coefficients") == "square_root":
        # The coefficients of independent noise said nothing, and the square root's are those of today.
        strategy.pop("coefficients", None)
    if str(data.get("_target_")).startswith("dpbench.data."):
        data.setdefault("split", "permutation")
    for entry in entry_points(group=_MOVED):
        for options in (groups.get("audit"), *groups.get("callbacks", {}).values()):
            if isinstance(options, dict) and options.get("_target_") == entry.name:
                options["_target_"] = entry.value.replace(":", ".")
    return config


def _refuse_code_of(folder: RunFolder, config: Any) -> None:
    """Raise ConfigurationError if a class would be imported from the run's own folder, which may hold foreign code.

    PYTHONPATH, or the script that calls this, may have Python look there, and in folders as in namespace packages.
    """
    forbidden = folder.path.resolve()
    remedy = (
        "nothing is imported from the folder of a run: start the command elsewhere, with classes of installed packages"
    )
    if any(Path(entry).resolve().is_relative_to(forbidden) for entry in sys.path):
        raise ConfigurationError(f"Python looks for modules in {folder} (sys.path), and {remedy}.")
    for target in targets_of(config):
        parts = target.split(".")
        for entry, depth in product(sys.path, range(1, len(parts))):
            package = Path(entry, *parts[:depth]).resolve()
            if package.is_relative_to(forbidden) and package.exists():
                raise ConfigurationError(
                    f"{folder.config} names {target}, which could come from {package}, and {remedy} or on PYTHONPATH."
                )
