"""A command line of `dpbench train`, composed by Hydra."""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from dpbench.errors import ConfigurationError, shown
from dpbench.harness.run.hydra_folder import optimizes


@dataclass(frozen=True)
class Command:
    """A command line, composed.

    Attributes:
        loader: Composes the jobs of a sweep.
        cfg: Configuration of the run, or of the sweep, from which its jobs are composed.
        overrides: The words, parsed; those of a sweep's own configuration first.
        sweeps: True for a sweep.
    """

    loader: Any
    cfg: DictConfig
    overrides: list[Override]
    sweeps: bool

    @property
    def swept(self) -> tuple[str, ...]:
        """Keys to which a sweep gives several values."""
        keys = [override.key_or_group for override in self.overrides if override.is_sweep_override()]
        return tuple(dict.fromkeys(keys))

    @property
    def task_overrides(self) -> list[Override]:
        """The words of the jobs; of those with one key the last."""
        overrides = {override.get_key_element(): override for override in self.overrides}
        return [override for override in overrides.values() if not override.is_hydra_override()]

    def jobs(self) -> list[list[str]]:
        """The words of each job of a grid; of an interval, in which a sweeper chooses, the start.

        Raises:
            ConfigurationError: There is none, or an interval without a sweeper that chooses.
        """
        values = []
        for override in self.task_overrides:
            key = override.get_key_element()
            sweep = override.value()
            if isinstance(sweep, IntervalSweep):
                if not optimizes(self.cfg.hydra):
                    raise ConfigurationError(
                        f"{override.input_line} requires an optimizing sweeper: add hydra/sweeper=optuna."
                    )
                values.append([f"{key}={sweep.start}"])
            elif override.is_sweep_override():
                values.append([f"{key}={value}" for value in override.sweep_string_iterator()])
            else:
                values.append([str(override.input_line)])
        jobs = [list(words) for words in itertools.product(*values)]
        if not jobs:
            raise ConfigurationError("the sweep has no jobs: one of its keys has no values.")
        return jobs

    def job(self, words: list[str], number: int) -> DictConfig:
        """Compose a job of a sweep as a launcher will do it."""
        job: DictConfig = self.loader.load_sweep_config(self.cfg, words)
        with open_dict(job):
            job.hydra.job.num = number
            job.hydra.job.id = number
        HydraConfig.instance().set_config(job)
        return job


def compose(flags: Namespace, loader: Any, name: str) -> Command:
    """Compose the run, or the sweep.

    Raises:
        ConfigurationError: A group is given several names.
    """
    parser = OverridesParser.create(loader)
    overrides = parser.parse_overrides(flags.overrides)
    for override in overrides:
        names = loader.get_group_options(override.key_or_group)
        single = override.is_sweep_override() or override.is_delete() or isinstance(override.value(), str)
        if names and not single:  # Hydra would merge several: a private strategy with none, say
            given = shown(override.value())
            raise ConfigurationError(f"{override.key_or_group} takes one name, not {given}. Known: {', '.join(names)}.")
    # Whether several values make a sweep is known only with the configuration, where hydra.mode may stand.
    cfg = loader.load_configuration(name, flags.overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
    sweeps = flags.multirun or cfg.hydra.mode == RunMode.MULTIRUN
    mode = RunMode.MULTIRUN if sweeps else RunMode.RUN
    loader.validate_sweep_overrides_legal(overrides, mode, from_shell=False)
    with read_write(cfg.hydra):
        cfg.hydra.mode = mode
        if sweeps:
            cfg.hydra.overrides.hydra.append("hydra.mode=MULTIRUN")  # jobs are composed from these words
    HydraConfig.instance().set_config(cfg)
    if sweeps:
        from dpbench.options import require_group  # brings pydantic, which takes a tenth of a second

        parameters = require_group(cfg.hydra.sweeper.get("params") or {}, "hydra.sweeper.params")
        overrides = parser.parse_overrides([f"{key}={value}" for key, value in parameters.items()]) + overrides
    return Command(loader, cfg, overrides, sweeps)
