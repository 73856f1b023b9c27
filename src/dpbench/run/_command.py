"""A command line of `dpbench train`, composed by Hydra."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from dpbench.errors import ConfigurationError, brief
from dpbench.options import shown
from dpbench.run.command_line import CommandLine, read_overrides


@dataclass(frozen=True)
class Command:
    """A command line, composed.

    Attributes:
        loader: Composes the jobs of a sweep.
        name: Primary configuration.
        cfg: Configuration of the run, or of the sweep, from which its jobs are composed.
        overrides: The words, parsed.
        sweeps: Whether it is a sweep.
    """

    loader: ConfigLoader
    name: str
    cfg: DictConfig
    overrides: list[Override]
    sweeps: bool

    def task_words(self) -> list[str]:
        """Overrides of the run as they were written: an interpolation in one is for the job."""
        words: Any = OmegaConf.to_container(self.cfg.hydra.overrides.task, resolve=False)
        return list(words)


def compose(line: CommandLine, loader: ConfigLoader, name: str) -> Command:
    """Compose the run, or the sweep; an error that is none of Hydra's names the word."""
    overrides = read_overrides(line.overrides, loader)
    _check_choices(overrides, loader)
    try:
        # Whether several values make a sweep is known only with the configuration, where hydra.mode may stand.
        cfg = loader.load_configuration(name, list(line.overrides), line.mode, validate_sweep_overrides=False)
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:  # Hydra's own, where a word is something that it does not expect
        mark = getattr(error, "problem_mark", None)  # of YAML
        if mark is not None:
            raise ConfigurationError(f"{mark.name}, {brief(error)}.") from error
        suspects = [word for word in line.overrides if "hydra." in word] or line.overrides
        raise ConfigurationError(f"{' '.join(suspects)} cannot be composed: {brief(error)}") from error
    mode = RunMode.MULTIRUN if line.flags.multirun else cfg.hydra.mode or line.mode
    if line.flags.multirun and cfg.hydra.mode == RunMode.RUN:
        warnings.warn("-m makes a sweep, whatever hydra.mode says.", stacklevel=2)
    if cfg.hydra.mode != mode:
        with read_write(cfg.hydra):
            cfg.hydra.mode = mode
            cfg.hydra.overrides.hydra.append(f"hydra.mode={mode.name}")  # jobs are composed from these words
    HydraConfig.instance().set_config(cfg)
    for override in overrides:
        if override.is_sweep_override():
            _check_several(override, mode)
    return Command(loader, name, cfg, overrides, mode == RunMode.MULTIRUN)


def _check_choices(overrides: Sequence[Override], loader: ConfigLoader) -> None:
    """A group takes one name: a list of them would merge files (a private strategy with none, say)."""
    for override in overrides:
        key = override.key_or_group
        if not key:
            raise ConfigurationError(f"invalid override {override.input_line!r}: expected KEY=VALUE or GROUP=NAME.")
        value = override.value()
        if override.is_sweep_override() or override.is_delete() or isinstance(value, str):
            continue
        names = loader.get_group_options(key)
        if names:
            raise ConfigurationError(f"{key} takes one name, not {shown(value)}. Known: {', '.join(names)}.")


def _check_several(override: Override, mode: RunMode) -> None:
    """Refuse several values of a key in a single run, and of Hydra's own keys anywhere."""
    if mode == RunMode.RUN:
        key, _, values = str(override.input_line).partition("=")
        as_list = f", or write {key}=[{values}] for a list" if isinstance(override.value(), ChoiceSweep) else ""
        raise ConfigurationError(
            f"{override.input_line} is several values: add -m for a sweep (dpbench train){as_list}."
        )
    if override.is_hydra_override() or override.key_or_group == "launcher":
        raise ConfigurationError(f"{override.input_line}: a sweep has one value of each of Hydra's own settings.")
