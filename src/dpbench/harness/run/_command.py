"""A command line of `dpbench train`, composed by Hydra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write

from dpbench.errors import ConfigurationError
from dpbench.harness.run._hydra_internals import BasicSweeper, ConfigLoaderImpl
from dpbench.harness.run.command_line import CommandLine
from dpbench.options import shown


@dataclass(frozen=True)
class Command:
    """A command line, composed.

    Attributes:
        loader: Composes the jobs of a sweep.
        name: Primary configuration.
        cfg: Configuration of the run, or of the sweep, from which its jobs are composed.
        overrides: The words, parsed; those of a sweep's own configuration first.
        sweeps: Whether it is a sweep.
    """

    loader: ConfigLoaderImpl
    name: str
    cfg: DictConfig
    overrides: list[Override]
    sweeps: bool

    @property
    def swept(self) -> tuple[str, ...]:
        """Keys to which a sweep gives several values."""
        keys = [override.key_or_group for override in self.overrides if override.is_sweep_override()]
        return tuple(dict.fromkeys(keys))

    def task_words(self) -> list[str]:
        """Overrides of the run as they were written: an interpolation in one is for the job."""
        words: Any = OmegaConf.to_container(self.cfg.hydra.overrides.task, resolve=False)
        return list(words)

    def combinations(self) -> list[list[str]]:
        """The words of each job of Hydra's own sweeper, which runs all combinations."""
        (jobs,) = BasicSweeper.split_arguments(self._task_overrides(), None)
        if not jobs:
            raise ConfigurationError("the sweep has no job: one of its keys has no value.")
        return jobs

    def first_trial(self) -> list[str]:
        """The words of a job that a sweeper such as Optuna may choose: each key has its first value."""
        words = []
        for override in self._task_overrides():
            key = override.get_key_element()
            value = override.value()
            if isinstance(value, IntervalSweep):
                words.append(f"{key}={value.start}")
            elif override.is_sweep_override():
                words.append(f"{key}={next(override.sweep_string_iterator())}")
            else:
                words.append(str(override.input_line))
        return words

    def _task_overrides(self) -> list[Override]:
        return [override for override in self.overrides if not override.is_hydra_override()]


def compose(line: CommandLine, loader: ConfigLoaderImpl, name: str) -> Command:
    """Compose the run, or the sweep.

    Raises:
        ConfigurationError: A group is given what is no name.
    """
    parser = OverridesParser.create(loader)
    overrides = parser.parse_overrides(list(line.overrides))
    _check_choices(overrides, loader)
    # Whether several values make a sweep is known only with the configuration, where hydra.mode may stand.
    cfg = loader.load_configuration(name, list(line.overrides), RunMode.MULTIRUN, validate_sweep_overrides=False)
    sweeps = line.flags.multirun or cfg.hydra.mode == RunMode.MULTIRUN
    mode = RunMode.MULTIRUN if sweeps else RunMode.RUN
    loader.validate_sweep_overrides_legal(overrides, mode, from_shell=False)
    with read_write(cfg.hydra):
        cfg.hydra.mode = mode
        if sweeps:
            cfg.hydra.overrides.hydra.append("hydra.mode=MULTIRUN")  # jobs are composed from these words
    HydraConfig.instance().set_config(cfg)
    if sweeps:
        parameters = cfg.hydra.sweeper.get("params") or {}
        overrides = parser.parse_overrides([f"{key}={value}" for key, value in parameters.items()]) + overrides
    return Command(loader, name, cfg, overrides, sweeps)


def _check_choices(overrides: Sequence[Override], loader: ConfigLoaderImpl) -> None:
    """A group takes one name: a list of them would merge files (a private strategy with none, say)."""
    for override in overrides:
        value = override.value()
        if override.is_sweep_override() or override.is_delete() or isinstance(value, str):
            continue
        names = loader.get_group_options(override.key_or_group)
        if names:
            raise ConfigurationError(
                f"{override.key_or_group} takes one name, not {shown(value)}. Known: {', '.join(names)}."
            )
