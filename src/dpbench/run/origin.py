"""Which command a run is of: what was said there, and of which sweep it is."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpbench.runs.command import key_of


@dataclass(frozen=True)
class Origin:
    """What a run's name in a log service is made of.

    Attributes:
        said: Keys that the command line set.
        sweep: Name of the sweep, or None.
        swept: The words in which the runs of the sweep differ, as this one has them.
    """

    said: frozenset[str] = frozenset()
    sweep: str | None = None
    swept: tuple[str, ...] = ()


def origin_of(hydra: Any) -> Origin:
    """Origin of a job, by Hydra's own configuration or, below `wandb agent`, by the agent's.

    Args:
        hydra: `HydraConfig.get()`.
    """
    words = [str(word) for word in OmegaConf.to_container(hydra.overrides, resolve=False)["task"]]  # type: ignore[index, call-overload]
    said = frozenset(map(key_of, words))
    if agent := os.environ.get("WANDB_SWEEP_ID"):
        return Origin(said, agent, _of_keys(words, _parameters_of_agent() or said))
    if hydra.mode != RunMode.MULTIRUN:
        return Origin(said)
    own = hydra.callbacks.get("folders") or {}
    return Origin(said, _named(Path(str(hydra.sweep.dir)).absolute()), _of_keys(words, own.get("swept") or ()))


def folder_key() -> str:
    """The setting that says where the run at hand lies: a job of a sweep is moved with its sweep."""
    swept = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return "hydra.sweep.dir" if swept else "hydra.run.dir"


def _of_keys(words: Sequence[str], keys: Collection[str]) -> tuple[str, ...]:
    return tuple(word.lstrip("+") for word in words if key_of(word) in keys)


def _named(folder: Path) -> str:
    """Folder of a sweep, as seen from here, or its last two names."""
    return (
        folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else Path(*folder.parts[-2:])
    ).as_posix()


def _parameters_of_agent() -> set[str]:
    """Names of what the agent has chosen; empty where it has not written them down."""
    with suppress(KeyError, OSError, YAMLError, OmegaConfBaseException):
        return set(map(str, OmegaConf.load(os.environ["WANDB_SWEEP_PARAM_PATH"]))) - {"wandb_version"}
    return set()
