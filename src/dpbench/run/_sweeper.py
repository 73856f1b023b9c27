"""The jobs of a sweep: all combinations of its values, or what a sweeper such as Optuna may choose on the way."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.types import IntervalSweep, Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from dpbench.errors import ConfigurationError
from dpbench.options import PositiveInt, checked_value
from dpbench.run._command import Command
from dpbench.run._hydra_internals import BasicSweeper
from dpbench.run.hydra_folder import is_named_by_time
from dpbench.runs.command import key_of
from dpbench.runs.folder import RunFolder

_Parameters = dict[str, str | int | float] | None
_Direction = Literal["minimize", "maximize"]
_MOST_JOBS = 10_000
_MOST_VALUES = 100  # of a key that are tried before a sweeper chooses among them


def sweeper_parameters(sweeper: DictConfig) -> list[str]:
    """List the parameters of the sweeper's own configuration as words."""
    settings: Any = OmegaConf.to_container(sweeper, resolve=True)
    parameters = checked_value(_Parameters, settings.get("params"), "hydra.sweeper.params") or {}
    return [f"{key}={values}" for key, values in parameters.items()]


def grid(sweeper: DictConfig, overrides: list[Override]) -> list[list[str]]:
    """The words of each job of Hydra's own sweeper, which runs all combinations."""
    size = sweeper.get("max_batch_size")
    if size is not None and size != -1 and size < 1:
        raise ConfigurationError(f"hydra.sweeper.max_batch_size must be positive (or null), not {size}.")
    count = math.prod(len(_values(override, _MOST_JOBS + 1)) for override in overrides)
    if count > _MOST_JOBS:
        raise ConfigurationError(f"the sweep has more than {_MOST_JOBS:,} jobs: divide it.")
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    for words, times in Counter(map(tuple, jobs)).items():
        if times > 1:
            raise ConfigurationError(f"the sweep has the run {' '.join(words)} twice: name each value once.")
    return jobs


def without_options_of_others(
    command: Command,
    overrides: Sequence[Override],
    jobs: Sequence[Sequence[str]],
) -> list[list[str]]:
    """Leave out of each job the options that its choices do not have, where other choices of the sweep have them.

    `strategy=dpsgd,none strategy.max_grad_norm=0.3,1` are three runs: two bounds, and none.

    Args:
        command: The sweep.
        overrides: Its words.
        jobs: All combinations.

    Returns:
        The jobs, each once.
    """
    groups = set(command.loader.list_groups(""))
    swept = [override.key_or_group for override in overrides if override.is_sweep_override()]
    prefixes = tuple(f"{group}." for group in swept if group in groups)
    options = []
    for override in overrides:
        # A word with + or ~ means what it says; ++ sets an option that is there as well as one that is not.
        sets_value = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD)
        if sets_value and override.key_or_group.startswith(prefixes):
            options.append(override.key_or_group)
    if not options:
        return [list(job) for job in jobs]
    configurations: dict[tuple[str, ...], DictConfig] = {}  # by the words that choose files
    choices_of_jobs = []
    for job in jobs:
        choices = tuple(word for word in job if key_of(word).partition("/")[0] in {*groups, "hydra"})
        choices_of_jobs.append(choices)
        if choices not in configurations:
            configurations[choices] = command.loader.load_sweep_config(command.cfg, list(choices))
    # An option that no choice has is a mistake, which composing the job will name.
    known_keys = set()
    for key in options:
        if any(_has(configuration, key) for configuration in configurations.values()):
            known_keys.add(key)
    shorter_jobs: dict[tuple[str, ...], None] = {}  # each once, in their order
    absent_keys: dict[str, None] = {}
    for job, choices in zip(jobs, choices_of_jobs, strict=True):
        words = []
        for word in job:
            key = key_of(word)
            if key in known_keys and not _has(configurations[choices], key):
                absent_keys[key] = None
            else:
                words.append(word)
        shorter_jobs[tuple(words)] = None
    if absent_keys:
        warnings.warn(
            f"{', '.join(absent_keys)}: left out of runs whose choices have no such option ({len(shorter_jobs)} runs "
            f"of {len(jobs)} combinations).",
            stacklevel=2,
        )
    return [list(job) for job in shorter_jobs]


def _has(configuration: DictConfig, key: str) -> bool:
    missing = object()
    return OmegaConf.select(configuration, key, default=missing) is not missing


def check_sweeper(settings: DictConfig) -> None:
    """Refuse a sweeper that chooses in the folder of another sweep."""
    folder = Path(str(settings.sweep.dir))
    # One that is named by the time will be a new one.
    if not is_named_by_time(settings, "sweep") and next(folder.rglob(RunFolder.lock), None) is not None:
        raise ConfigurationError(
            f"{folder} holds runs of another sweep, and what that one chose would be written over: name another folder "
            "(hydra.sweep.dir)."
        )
    for key in ("n_trials", "n_jobs"):
        if key in settings.sweeper:
            checked_value(PositiveInt, settings.sweeper[key], f"hydra.sweeper.{key}")
    direction = settings.sweeper.get("direction")
    if isinstance(direction, str):
        checked_value(_Direction, direction, "hydra.sweeper.direction")


def possible_trials(overrides: Sequence[Override]) -> list[list[str]]:
    """Make trials in which each value of a key stands once, and both ends of each interval.

    Of a long list these are the first `_MOST_VALUES`.
    """
    columns = [_values(override, _MOST_VALUES) for override in overrides]
    length = max(map(len, columns), default=1)
    return [[column[min(row, len(column) - 1)] for column in columns] for row in range(length)]


def _values(override: Override, most: int) -> list[str]:
    """The values of an override, each as a word; of an interval both ends."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    value = override.value()
    key = override.get_key_element()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}", f"{key}={value.end}"]
    words = [f"{key}={text}" for text in islice(override.sweep_string_iterator(), most)]
    if not words:
        raise ConfigurationError(f"{override.input_line} leaves nothing to run: the sweep has no job.")
    return words
