"""Where a run's metrics go beside its own metrics.csv: wandb, and any of Lightning's loggers by its class."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger
from pytorch_lightning.loggers.logger import Logger

from dpbench.errors import ConfigurationError
from dpbench.run.build import made
from dpbench.run.checks import LOGGER, class_of, other_loggers
from dpbench.run.kept_loggers import keep, kept
from dpbench.run.options import options_of
from dpbench.run.origin import Origin
from dpbench.run.processes import is_first
from dpbench.run.search_path import installing
from dpbench.runs.folder import Run
from dpbench.runs.metrics_log import MetricsCSV

_PACKAGES: Mapping[type, tuple[str, tuple[str, ...]]] = {
    TensorBoardLogger: ("tensorboard", ("tensorboard", "tensorboardX")),
    MLFlowLogger: ("mlflow", ("mlflow",)),
}
"""Class → the extra that brings what it imports, and the packages of which it needs one."""
_RUN_ID = "run_id"


def require_installed(config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, with the command that helps, where a logger's package is missing."""
    for name, options in other_loggers(config).items():
        cls = class_of(options, f"logger.{name}", LOGGER)
        extra, packages = next((own for base, own in _PACKAGES.items() if issubclass(cls, base)), ("", ()))
        if packages and not any(find_spec(package) for package in packages):
            raise ConfigurationError(f"logger={name} needs {packages[0]}, which is not installed: {installing(extra)}.")


def build_loggers(run: Run, origin: Origin) -> list[Logger]:
    """The run's own log first, then those that the configuration asks for.

    Args:
        run: Whose metrics they get.
        origin: What it is called by.

    Raises:
        ConfigurationError: One cannot be made.
    """
    loggers: list[Logger] = [MetricsCSV(run.folder)]
    if not is_first():
        return loggers  # which write nothing there
    if run.config["logger"].get("wandb"):
        from dpbench.run.wandb_log import wandb_logger

        loggers.append(wandb_logger(run, origin))
    return [*loggers, *(_other(run, origin, name, own) for name, own in other_loggers(run.config).items())]


def _other(run: Run, origin: Origin, name: str, options: Mapping[str, Any]) -> Logger:
    """Make a logger of its options, of what it takes of the run and the configuration leaves open."""
    from dpbench.run.wandb_log import named

    group, cls = f"logger.{name}", class_of(options, f"logger.{name}", LOGGER)
    resumed, before = run.config["run"]["resume"], kept(run.folder, name)
    ours: dict[str, Any] = {"save_dir": str(run.folder), "name": name}
    if _RUN_ID in options_of(cls):
        ours |= {"run_name": named(run.config, origin, {})["name"], **(before if resumed else {})}
    taken = {key: value for key, value in ours.items() if key in options_of(cls) and options.get(key) is None}
    logger: Logger = made(cls, {**options, **taken}, group)
    if _RUN_ID in options_of(cls):
        keep(run.folder, name, {_RUN_ID: made(lambda: getattr(logger, _RUN_ID), {}, group)})  # and begin the run, here
    if not resumed:
        logger.log_hyperparams(run.config)
    return logger
