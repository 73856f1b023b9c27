"""Every job of a command, composed and checked before the first one starts or a folder is made."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpbench.errors import ConfigurationError, brief
from dpbench.options import shown
from dpbench.run.config import check_config
from dpbench.run.deadline import seconds_of
from dpbench.run.flags import asks, flags_of
from dpbench.run.objective import optimizes, refuse_choice
from dpbench.run.trials import check_trials, possible_trials
from dpbench.run.words import read_words, refuse_many

_AHEAD = re.compile(r"all|\d*[1-9]\d*(\s*\*\s*n_jobs)?|n_jobs(\s*\*\s*\d*[1-9]\d*)?")


def preflight(words: Sequence[str], conf: Path, name: str) -> list[list[str]]:
    """Compose and check whatever a command would run.

    Args:
        words: Hydra overrides and flags.
        conf: Folder of the configuration.
        name: Primary configuration in it.

    Returns:
        The words of each job of a sweep; none of a single run, and where a sweeper chooses them on the way.

    Raises:
        ConfigurationError: A run's configuration is wrong, a sweep has no run, or its sweeper may not choose.
        HydraException: The words do not compose.
    """
    if asks(words):
        return []
    flags = flags_of(words)
    if flags.config_path is not None:
        raise ConfigurationError("--config-path takes the place of all configuration: add your own with --config-dir.")
    if flags.package is not None:
        raise ConfigurationError("--package changes nothing of a run: leave it out.")
    primary = flags.config_name or name
    with _loaded(conf, flags.config_dir) as hydra:
        _refuse_other_choices(hydra, flags.overrides)
        many = flags.multirun or hydra.get_mode(primary, flags.overrides) == RunMode.MULTIRUN
        master = _composed(hydra, primary, flags.overrides, RunMode.MULTIRUN if many else RunMode.RUN)
        if not many:
            _refuse_launchers(flags.overrides)
            _check_places(master.hydra, ("run.dir",))
            _check_job(master)
            return []
        chooses = optimizes(master.hydra)
        _check_places(master.hydra, ("sweep.dir", "sweep.subdir"))
        jobs = _jobs(hydra, master, chooses)
        for overrides in jobs:
            job = _composed(hydra, primary, [*_words(master, "hydra"), *overrides], RunMode.RUN)
            config = _check_job(job)
            _check_queue(master.hydra.launcher, config["run"].get("max_time"))
            if chooses:
                direction = master.hydra.sweeper.get("direction")
                refuse_choice(config, direction if isinstance(direction, str) else getattr(direction, "name", None))
        return [] if chooses else jobs


@contextmanager
def _loaded(conf: Path, more: str | None) -> Iterator[Hydra]:
    path = create_automatic_config_search_path(None, None, str(conf.resolve()))
    if more is not None:
        if not Path(more).is_dir():
            raise ConfigurationError(f"--config-dir {more} is no folder.")
        path.prepend("command-line", f"file://{os.path.abspath(more)}", SearchPathQuery(provider="schema"))
    before = HydraConfig.instance().cfg
    try:
        yield Hydra.create_main_hydra2("train", path)
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = before


def _composed(hydra: Hydra, name: str, overrides: Sequence[str], mode: RunMode) -> DictConfig:
    try:
        cfg = hydra.compose_config(name, list(overrides), run_mode=mode, with_log_configuration=False)
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:  # Hydra's own, where a word is something that it does not expect
        if (mark := getattr(error, "problem_mark", None)) is not None:
            raise ConfigurationError(f"{mark.name}, {brief(error)}.") from error
        bad = [word for word in overrides if "hydra." in word] or overrides
        raise ConfigurationError(f"{' '.join(bad)} cannot be composed: {brief(error)}") from error
    HydraConfig.instance().set_config(cfg)
    return cfg


def _refuse_other_choices(hydra: Hydra, overrides: Sequence[str]) -> None:
    """A group takes one name: a list of them would merge files (a private strategy with none, say)."""
    loader = hydra.config_loader
    for one in read_words(overrides, loader):
        key = one.key_or_group
        if not key:
            raise ConfigurationError(f"{one.input_line!r} is no setting: write KEY=VALUE or GROUP=NAME.")
        if key == "hydra.searchpath" and isinstance(places := one.value(), list):
            _check_search_path(places)
        if one.is_sweep_override() or one.is_delete() or isinstance(one.value(), str):
            continue
        if names := loader.get_group_options(key):
            raise ConfigurationError(f"{key} takes one name, not {shown(one.value())}. Known: {', '.join(names)}.")


def _refuse_launchers(overrides: Sequence[str]) -> None:
    """A single run is made here and now, wherever the user wanted it to go."""
    for word in overrides:
        key, _, choice = word.partition("=")
        if key in ("launcher", "hydra/launcher") and choice != "basic":
            raise ConfigurationError(f"{word} is for sweeps, and this is one run, made here: add -m, or leave it out.")


def _jobs(hydra: Hydra, master: DictConfig, chooses: bool) -> list[list[str]]:
    """The overrides of each job; of a sweeper that chooses, of some that it may come to."""
    sweeper: Any = master.hydra.sweeper
    params = _parameters(sweeper)
    words = [*(f"{key}={value}" for key, value in params.items()), *_words(master, "task")]
    parsed = read_words(words, hydra.config_loader)
    if chooses:
        check_trials(master.hydra, parsed)
        return possible_trials(parsed)
    size = sweeper.get("max_batch_size")
    if size is not None and size != -1 and size < 1:
        raise ConfigurationError(f"hydra.sweeper.max_batch_size must be positive (or null), not {size}.")
    refuse_many(parsed)
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    if not jobs:
        empty = [
            str(one.input_line) for one in parsed if one.is_sweep_override() and not [*one.sweep_string_iterator()]
        ]
        raise ConfigurationError(f"{' '.join(empty)} leaves nothing to run: the sweep has no job.")
    twice = [job for job, count in Counter(map(tuple, jobs)).items() if count > 1]
    if twice:
        raise ConfigurationError(f"the sweep has the run {' '.join(twice[0])} twice: name each value once.")
    return jobs


def _words(master: DictConfig, kind: str) -> list[str]:
    """Overrides as they were written: an interpolation in one is for the job."""
    words: Any = OmegaConf.to_container(master.hydra.overrides, resolve=False)
    return [str(word) for word in words[kind]]


def _parameters(sweeper: DictConfig) -> Mapping[str, str]:
    params = OmegaConf.to_container(sweeper, resolve=True).get("params") or {}  # type: ignore[union-attr]
    if not isinstance(params, Mapping) or not all(isinstance(value, str | int | float) for value in params.values()):
        raise ConfigurationError(
            f"hydra.sweeper.params gives each key its values in one word, such as {{seed: '0,1'}}, not {shown(params)}."
        )
    return params


def _check_places(hydra: DictConfig, keys: Sequence[str]) -> None:
    for key in keys:
        raw = OmegaConf.to_container(hydra, resolve=False)
        for part in key.split("."):
            raw = raw[part] if isinstance(raw, Mapping) else None
        if not isinstance(raw, str) or not raw.strip():
            raise ConfigurationError(f"hydra.{key} must be the path of a folder, not {shown(raw)}.")
    if hydra.launcher.get("n_jobs", 1) == 0:
        raise ConfigurationError("hydra.launcher.n_jobs=0 runs nothing: 2 runs two at a time, -1 one on each core.")
    ahead = str(hydra.launcher.get("pre_dispatch", "all"))
    if not _AHEAD.fullmatch(ahead):
        raise ConfigurationError(f"hydra.launcher.pre_dispatch must be a number, 2*n_jobs or all, not {shown(ahead)}.")


def _check_queue(launcher: DictConfig, max_time: str | None) -> None:
    """A run that means to stop by itself must do so before its queue ends it."""
    minutes = launcher.get("timeout_min")
    if max_time is not None and minutes is not None and seconds_of(max_time) >= 60 * minutes:
        raise ConfigurationError(
            f"run.max_time={max_time} is no shorter than the queue's limit (hydra.launcher.timeout_min={minutes}), "
            "which would end the run before: make it shorter, or leave it out, since the queue gives notice."
        )


def _check_search_path(entries: Sequence[Any]) -> None:
    """Hydra goes on without what is not there, and says so only in a log."""
    for entry in entries:
        kind, _, place = str(entry).partition("://")
        there = True
        if kind == "file":
            there = Path(place).is_dir()
        elif kind == "pkg":
            try:
                there = find_spec(place.replace("/", ".").strip(".")) is not None
            except (ImportError, ValueError):
                there = False
        if not there:
            raise ConfigurationError(f"hydra.searchpath: there is no {entry} (or it is no folder).")


def _check_job(cfg: DictConfig) -> dict[str, Any]:
    from dpbench.run.build import plain
    from dpbench.run.logs import environment_mode, require_installed

    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    config = plain(own)
    check_config(config)
    require_installed(config)
    if config["logger"].get("wandb"):
        environment_mode()
    return config
