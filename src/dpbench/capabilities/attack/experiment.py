"""Training of the runs that an attack compares: one sweep over seeds, each of which has its own members."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict, read_write

from dpbench.capabilities.attack.attack import FEWEST_RUNS
from dpbench.errors import ConfigurationError
from dpbench.harness.run import build
from dpbench.harness.run.hydra_folder import output_dir, quoted
from dpbench.harness.run.jobs import launch
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.run.train import train_job
from dpbench.harness.runs.command import key_of
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.provenance import config_hash

FOLDER = Path("attacks")
_DECIDED = ("seed", "data.membership", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.run.dir", "hydra.mode")


def train_runs(
    runs: int,
    words: Sequence[str],
    folder: Path | None = None,
    config_dir: Path | None = None,
) -> Path:
    """Train a sweep over seeds, in which each run has members of its own; finished runs stay.

    Args:
        runs: Number of seeds, from 0 on.
        words: Overrides of Hydra, sweeps among them: each combination is trained with all seeds.
        folder: Folder of the sweep; None: one determined by the words, so that the same words go on where they stopped.
        config_dir: Folder of --config-dir, as for `dpbench train`.

    Returns:
        The folder.

    Raises:
        ConfigurationError: There are too few runs, a word sets what the attack sets, the folder holds runs of
            other settings, or `launch` refuses the words.
    """
    if runs < FEWEST_RUNS:
        raise ConfigurationError(f"--train must be at least {FEWEST_RUNS} (better 16 or 64), not {runs}.")
    for word in words:
        if key_of(word) in _DECIDED:
            raise ConfigurationError(
                f"{word}: dpbench attack --train decides seeds, members and folders; remove it (the folder: --out)."
            )
    place = folder or FOLDER / _name_of(runs, words)
    # The seed is the slowest to change, so that more runs later take numbers, and folders, behind those that are there.
    sweep = [
        f"hydra.sweep.dir={quoted(place)}",
        "data.membership=half",
        f"seed=range(0,{runs})",
    ]
    if not any(key_of(word) == "logger" for word in words):
        sweep.append("logger=none")
    flags = ["-m"] if config_dir is None else ["-m", "--config-dir", str(config_dir)]
    launch([*flags, *sweep, *words], train_or_go_on)
    return place


def train_or_go_on(cfg: DictConfig) -> list[float] | None:
    """Run the job of one seed: train it, resume an interrupted run, or do nothing if it has ended.

    Args:
        cfg: The composed configuration.

    Raises:
        ConfigurationError: The folder holds a run of other settings.
    """
    run = RunFolder(output_dir(HydraConfig.get()))
    if run.begun:
        if config_hash(read_config(run)) != config_hash(build.plain(cfg)):
            raise ConfigurationError(
                f"{run} holds a run with other settings: choose another folder (--out), or delete that one."
            )
        if run.finished:
            return None
        with read_write(cfg), open_dict(cfg):
            cfg.run.resume = True
    return train_job(cfg)


def _name_of(runs: int, words: Sequence[str]) -> str:
    """A name that the words determine."""
    digest = hashlib.sha256("\0".join([str(runs), *words]).encode()).hexdigest()
    return f"{runs}-runs-{digest[:8]}"
