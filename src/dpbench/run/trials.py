"""A sweep whose sweeper chooses: what is refused of it before its first trial."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from dpbench.errors import ConfigurationError
from dpbench.options import shown
from dpbench.runs.folder import RunFolder

_MOST = 100  # values of a key that are tried beforehand
_DIRECTIONS = ("minimize", "maximize")


def check_trials(hydra: DictConfig, words: Sequence[Override]) -> None:
    """Refuse what the sweeper would fail at, some of it after trials that had cost their epsilon.

    Args:
        hydra: Hydra's own configuration of the sweep.
        words: Its overrides, and what the sweeper's parameters say.

    Raises:
        ConfigurationError: A setting of the sweeper, or an interval, makes no sense; or the folder is that of another
            sweep.
    """
    _refuse_taken(hydra)
    for one in words:
        value = one.value()
        if isinstance(value, IntervalSweep) and not (value.start or 0) < (
            value.end or 0
        ):  # of numbers, Hydra sees to it
            raise ConfigurationError(f"{one.input_line} has no inside: write interval(LEAST,LARGEST).")
    sweeper: Any = hydra.sweeper
    if not str(sweeper["_target_"]).endswith("OptunaSweeper"):
        return
    own = sweeper.get("search_space") or sweeper.get("custom_search_space")
    if not own and not any(one.is_sweep_override() for one in words):
        raise ConfigurationError(
            "the sweeper has nothing to choose: give a key several values or an interval, such as "
            "'optimizer.lr=interval(0.01,1)'."
        )
    for key in ("n_trials", "n_jobs"):
        if sweeper[key] < 1:
            raise ConfigurationError(f"hydra.sweeper.{key} must be positive, not {sweeper[key]}.")
    if isinstance(sweeper.direction, str) and sweeper.direction not in _DIRECTIONS:
        raise ConfigurationError(
            f"hydra.sweeper.direction must be maximize or minimize, not {shown(sweeper.direction)}."
        )
    storage = sweeper.storage
    if isinstance(storage, str) and not version("sqlalchemy").startswith("1."):
        raise ConfigurationError(
            f"hydra.sweeper.storage={storage} keeps nothing: Optuna 2.10 does not commit with SQLAlchemy 2. Make it of "
            "optuna.storages.RDBStorage with engine_kwargs: {isolation_level: AUTOCOMMIT}, as docs/sweeps.md shows."
        )
    if str(sweeper.sampler.get("_target_")).endswith("GridSampler"):
        for one in words:
            if one.is_interval_sweep():
                raise ConfigurationError(f"a grid takes single values, not {one.input_line}: list them.")


def _refuse_taken(hydra: DictConfig) -> None:
    """Such a sweeper numbers its trials from 0 on, and writes what it found over what another one has."""
    raw: Any = OmegaConf.to_container(hydra, resolve=False)
    if "${now:" in raw["sweep"]["dir"]:  # another name is found for it
        return
    folder = Path(str(hydra.sweep.dir))
    if next(folder.rglob(RunFolder.lock), None) is not None:
        raise ConfigurationError(
            f"{folder} holds runs of another sweep, and what that one chose would be written over: name another folder "
            "(hydra.sweep.dir)."
        )


def possible_trials(words: Sequence[Override]) -> list[list[str]]:
    """Overrides of trials in which every value stands that a key may get, and both ends of every interval."""
    values = [_values(one) for one in words]
    return [[own[min(i, len(own) - 1)] for own in values] for i in range(max(map(len, values), default=1))]


def _values(one: Override) -> list[str]:
    if not one.is_sweep_override():
        return [str(one.input_line)]
    value, key = one.value(), one.get_key_element()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}", f"{key}={value.end}"]
    found = [f"{key}={text}" for text in islice(one.sweep_string_iterator(), _MOST)]
    if not found:
        raise ConfigurationError(f"{one.input_line} leaves nothing to choose from.")
    return found
