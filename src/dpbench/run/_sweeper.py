"""The jobs of a sweep: all combinations of its values, or what a sweeper such as Optuna may choose on the way."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import hydra
import hydra.utils
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf

from dpbench.errors import ConfigurationError
from dpbench.options import shown
from dpbench.run._command import Command
from dpbench.run._hydra_internals import BasicSweeper
from dpbench.run.hydra_folder import is_named_by_time
from dpbench.runs.command import key_of
from dpbench.runs.folder import RunFolder

_MOST_JOBS = 10_000
_MOST_VALUES = 100  # of a key that are tried before a sweeper chooses among them


def sweeper_parameters(sweeper: DictConfig) -> list[str]:
    """What the sweeper's own configuration sweeps over, as words."""
    settings: Any = OmegaConf.to_container(sweeper, resolve=True)
    parameters = settings.get("params") or {}
    if not isinstance(parameters, Mapping) or not all(isinstance(v, str | int | float) for v in parameters.values()):
        raise ConfigurationError(
            "hydra.sweeper.params gives each key its values in one word, such as {seed: '0,1'}, not "
            f"{shown(parameters)}."
        )
    return [f"{key}={values}" for key, values in parameters.items()]


def grid(sweeper: DictConfig, overrides: list[Override]) -> list[list[str]]:
    """The words of each job of Hydra's own sweeper, which runs all combinations."""
    size = sweeper.get("max_batch_size")
    if size is not None and size != -1 and size < 1:
        raise ConfigurationError(f"hydra.sweeper.max_batch_size must be positive (or null), not {size}.")
    count = math.prod(_size(override) for override in overrides)  # of which none is made yet
    if not count <= _MOST_JOBS:
        raise ConfigurationError(
            f"the sweep has {count:,.0f} jobs, and more than {_MOST_JOBS:,} are refused: divide it."
        )
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    if not jobs:
        empty = [str(override.input_line) for override in overrides if _size(override) == 0]
        if not empty:  # what a glob matches only Hydra knows
            empty = [str(override.input_line) for override in overrides if override.is_sweep_override()]
        raise ConfigurationError(f"{' '.join(empty)} leaves nothing to run: the sweep has no job.")
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
    swept_groups = []
    for override in overrides:
        if override.is_sweep_override() and command.loader.get_group_options(override.key_or_group):
            swept_groups.append(override.key_or_group)
    prefixes = tuple(f"{group}." for group in swept_groups)
    if not any(override.key_or_group.startswith(prefixes) for override in overrides):
        return [list(job) for job in jobs]
    groups = {*command.loader.list_groups(""), "hydra"}
    configurations: dict[tuple[str, ...], DictConfig] = {}  # by the words that choose files
    for job in jobs:
        choices = _choices_of_job(job, groups)
        if choices not in configurations:
            configurations[choices] = command.loader.load_sweep_config(command.cfg, list(choices))
    shorter_jobs: dict[tuple[str, ...], None] = {}  # each once, in their order
    absent_options: dict[str, dict[str, None]] = {}  # by choice, in the order of the words
    for job in jobs:
        choices = _choices_of_job(job, groups)
        configuration = configurations[choices]
        words = []
        for word in job:
            key = key_of(word)
            # A word with + or ~ means what it says; ++ sets an option that is there as well as one that is not.
            if not word.removeprefix("++").startswith(prefixes) or _has(configuration, key):
                words.append(word)
                continue
            if not any(_has(other, key) for other in configurations.values()):
                words.append(word)  # a mistake, which composing the job will name
                continue
            group, _, option = key.partition(".")
            choice = next(word for word in choices if key_of(word) == group)
            absent_options.setdefault(choice, {})[option] = None
        shorter_jobs[tuple(words)] = None
    if absent_options:
        parts = [f"{choice} has no {', '.join(options)}" for choice, options in absent_options.items()]
        warnings.warn(
            f"{'; '.join(parts)}: left out there ({len(shorter_jobs)} runs of {len(jobs)} combinations).",
            stacklevel=2,
        )
    return [list(job) for job in shorter_jobs]


def _choices_of_job(job: Sequence[str], groups: Collection[str]) -> tuple[str, ...]:
    """The words of a job that choose files of groups."""
    return tuple(word for word in job if key_of(word).partition("/")[0] in groups)


def _has(configuration: DictConfig, key: str) -> bool:
    missing = object()
    return OmegaConf.select(configuration, key, default=missing) is not missing


def _size(override: Override) -> float:
    """How many values an override gives its key; math.inf for a range without end."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1
    steps = (float(value.stop or 0) - float(value.start or 0)) / float(value.step)
    return max(0.0, math.ceil(steps)) if math.isfinite(steps) else math.inf


def check_sweeper(settings: DictConfig, overrides: Sequence[Override]) -> None:
    """Refuse what a sweeper that chooses would fail at, some of it after trials that had cost their epsilon."""
    folder = Path(str(settings.sweep.dir))
    # One that is named by the time will be a new one.
    if not is_named_by_time(settings, "sweep") and next(folder.rglob(RunFolder.lock), None) is not None:
        raise ConfigurationError(
            f"{folder} holds runs of another sweep, and what that one chose would be written over: name another folder "
            "(hydra.sweep.dir)."
        )
    for override in overrides:
        value = override.value()
        # Of numbers Hydra sees to it.
        if isinstance(value, IntervalSweep) and not (value.start or 0) < (value.end or 0):
            raise ConfigurationError(f"{override.input_line} has no inside: write interval(LEAST,LARGEST).")
    if _is_optuna(settings.sweeper):
        _check_optuna(settings.sweeper, overrides)


def _check_optuna(sweeper: DictConfig, overrides: Sequence[Override]) -> None:
    space = sweeper.get("search_space") or sweeper.get("custom_search_space")
    if not space and not any(override.is_sweep_override() for override in overrides):
        raise ConfigurationError(
            "the sweeper has nothing to choose: give a key several values or an interval, such as "
            "'optimizer.lr=interval(0.01,1)'."
        )
    for key in ("n_trials", "n_jobs"):
        if sweeper[key] < 1:
            raise ConfigurationError(f"hydra.sweeper.{key} must be positive, not {sweeper[key]}.")
    if isinstance(sweeper.direction, str) and sweeper.direction not in ("minimize", "maximize"):
        raise ConfigurationError(
            f"hydra.sweeper.direction must be maximize or minimize, not {shown(sweeper.direction)}."
        )
    if isinstance(sweeper.storage, str) and not version("sqlalchemy").startswith("1."):
        raise ConfigurationError(
            f"hydra.sweeper.storage={sweeper.storage} keeps nothing: Optuna 2.10 does not commit with SQLAlchemy 2. "
            "Make it of optuna.storages.RDBStorage with engine_kwargs: {isolation_level: AUTOCOMMIT}, as "
            "docs/sweeps.md shows."
        )
    if str(sweeper.sampler.get("_target_")).endswith("GridSampler"):
        for override in overrides:
            if override.is_interval_sweep():
                raise ConfigurationError(f"a grid takes single values, not {override.input_line}: list them.")


def _is_optuna(sweeper: DictConfig) -> bool:
    return str(sweeper["_target_"]).endswith("OptunaSweeper")


def check_study(sweeper: DictConfig) -> None:
    """Refuse to go on with a study of the other direction."""
    if not _is_optuna(sweeper) or sweeper.storage is None or sweeper.study_name is None:
        return
    import optuna

    try:
        study = optuna.load_study(sweeper.study_name, hydra.utils.instantiate(sweeper.storage))
    except KeyError:  # there is no such study yet
        return
    directions = sweeper.direction
    if isinstance(directions, str) or not isinstance(directions, Sequence):
        directions = [directions]
    expected = [str(getattr(direction, "name", direction)).upper() for direction in directions]
    if [direction.name for direction in study.directions] != expected:
        raise ConfigurationError(
            "the study in hydra.sweeper.storage was begun with the other hydra.sweeper.direction: take the same one, "
            "or another hydra.sweeper.study_name."
        )


def possible_trials(overrides: Sequence[Override]) -> list[list[str]]:
    """Make trials in which each value of a key stands once, and both ends of each interval.

    Of a long list these are the first `_MOST_VALUES`.
    """
    columns = [_values(override) for override in overrides]
    length = max(map(len, columns), default=1)
    return [[column[min(row, len(column) - 1)] for column in columns] for row in range(length)]


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    value = override.value()
    key = override.get_key_element()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}", f"{key}={value.end}"]
    words = [f"{key}={text}" for text in islice(override.sweep_string_iterator(), _MOST_VALUES)]
    if not words:
        raise ConfigurationError(f"{override.input_line} leaves nothing to choose from.")
    return words
