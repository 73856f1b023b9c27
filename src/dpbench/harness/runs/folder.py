"""The folder of a run: the one place that knows the names of its files."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import yaml

from dpbench.errors import ConfigurationError

FastLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loader of YAML by libyaml, if available: fifteen times as fast."""
_NUMBER = re.compile(r"([0-9]+)")


class _Entry:
    """A file or folder below a run's folder: its path on an instance, its name on the class.

    Args:
        name: Relative to the run's folder, with slashes.
        is_folder: True for a folder.
    """

    def __init__(self, name: str, is_folder: bool = False) -> None:
        self._name = name
        self.is_folder = is_folder

    @overload
    def __get__(self, folder: None, owner: type[RunFolder]) -> str: ...
    @overload
    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path: ...
    def __get__(self, folder: RunFolder | None, owner: type[RunFolder]) -> Path | str:
        return self._name if folder is None else folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run's files. `RunFolder(path).ledger` is a path, `RunFolder.ledger` the name alone.

    Attributes:
        path: The folder; it need not exist.
        config: The resolved configuration, from which a resume starts.
        hydra: How the configuration came about, as Hydra writes it down.
        log: Log of a job by Python's logging.
        lock: Held by the process that trains in the folder.
        job: The scheduler's job that began the run, if any.
        wandb: Files of the run in wandb, if it is logged there.
        loggers: State of loggers for a resume, such as the run's id in wandb.
        ledger: Every release, see `privacy.accounting.ledger`.
        metrics: Logged metrics, a line for each step.
        checkpoints: Folder of the checkpoint and of its other files.
        checkpoint: The last one.
        checkpoint_metrics: Last value of everything that was logged before the checkpoint.
        result: Record of the finished run.
        partial_result: Record of an interrupted run.
        diverged: Reason of a run's divergence, after which it cannot be resumed.
        evaluation: Evaluation of a GAN's synthetic images.
        audit: Observations of an audit in the releases.
        curves: Picture of the metrics.
        samples: Picture of a GAN's present images.
        samples_by_step: Folder of such pictures, one for each validation.
        gradient_histogram: Values of private gradients, not private.
        diagnostics: Picture of the diagnostics, not private.
        exposure: Exposure of each record that was inserted into the training data, not private.
    """

    path: Path

    config = _Entry("config.yaml")
    hydra = _Entry(".hydra", is_folder=True)
    log = _Entry("train.log")
    lock = _Entry(".lock")
    job = _Entry(".job")
    wandb = _Entry("wandb", is_folder=True)
    loggers = _Entry("loggers.json")
    ledger = _Entry("ledger.jsonl")
    metrics = _Entry("metrics.csv")
    checkpoints = _Entry("checkpoints", is_folder=True)
    checkpoint = _Entry("checkpoints/last.ckpt")
    checkpoint_metrics = _Entry("checkpoints/metrics.json")
    result = _Entry("result.json")
    partial_result = _Entry("partial_result.json")
    diverged = _Entry("diverged.txt")
    evaluation = _Entry("evaluation.json")
    audit = _Entry("audit.json")
    curves = _Entry("curves.png")
    samples = _Entry("samples.png")
    samples_by_step = _Entry("samples", is_folder=True)
    gradient_histogram = _Entry("nonprivate_gradient_histogram.csv")
    diagnostics = _Entry("nonprivate_diagnostics.png")
    exposure = _Entry("nonprivate_exposure.csv")

    def __str__(self) -> str:
        return str(self.path)

    def command(self, name: str) -> str:
        """A command on the run as it is typed in a shell, in any folder.

        >>> RunFolder(Path("my runs/1")).command("resume")
        "dpbench resume 'my runs/1'"
        """
        command = f"dpbench {name} {shlex.quote(str(self))}"
        return command if self.config_dir is None else f"{command} --config-dir {shlex.quote(self.config_dir)}"

    @property
    def config_dir(self) -> str | None:
        """The folder that the run's command named with --config-dir; None without one.

        Read from the run's folder, which may be another person's: show it to the user, and import nothing from it.
        """
        try:
            settings = yaml.load((self.hydra / "hydra.yaml").read_text(encoding="utf-8"), FastLoader)
            for source in settings["hydra"]["runtime"]["config_sources"]:
                if source["provider"] == "command-line" and source["path"].isprintable():
                    return str(source["path"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
            pass  # a run without the file, or a damaged one, which is not needed
        return None

    def refuse_misplaced(self) -> None:
        """Raise ConfigurationError where a folder has the name of one of the run's files, or the other way round."""
        for entry in vars(type(self)).values():
            if not isinstance(entry, _Entry):
                continue
            path = entry.__get__(self, type(self))
            if path.exists() and path.is_dir() != entry.is_folder:
                kinds = "file instead of a folder" if entry.is_folder else "folder instead of a file"
                raise ConfigurationError(f"{path} is a {kinds}: move it away.")

    @property
    def finished(self) -> bool:
        """Return whether the run has left its result."""
        return self.result.is_file()

    @property
    def begun(self) -> bool:
        """Return whether the run has left the configuration from which it can be resumed."""
        return self.config.is_file()

    @property
    def trained(self) -> bool:
        """Return whether there is a file that only a training writes."""
        return any(path.exists() for path in (self.ledger, self.metrics, self.checkpoint))


@dataclass(frozen=True)
class Run:
    """A run that is being made.

    Attributes:
        folder: Folder of its files.
        config: Its resolved configuration.
        private: True if its strategy is private.
        trust: True if its checkpoints may hold objects of any class: this command makes the run, or was told so.
    """

    folder: RunFolder
    config: dict[str, Any]
    private: bool = True
    trust: bool = False


def finished_runs_below(folders: Collection[Path]) -> list[RunFolder]:
    """Folders of finished runs: those that were named, and all below them, in `natural_order`.

    Args:
        folders: Folders of runs, or of sweeps.

    Raises:
        ConfigurationError: A folder among them cannot be looked into.
    """
    places: set[Path] = set()
    for folder in folders:
        places.update(places_of(RunFolder.result, folder))
    return [RunFolder(path) for path in sorted(places, key=natural_order)]


def unfinished_runs_below(folder: Path) -> list[RunFolder]:
    """Runs below a folder that were begun and can be resumed: interrupted, failed, or still under way."""
    runs = map(RunFolder, places_of(RunFolder.lock, folder))
    return [run for run in runs if run.begun and not run.finished and not run.diverged.exists()]


def natural_order(path: Path | str) -> list[str | int]:
    """A key to sort paths by: numbers in them by their size.

    >>> sorted(["10-run", "2-run", "1-run"], key=natural_order)
    ['1-run', '2-run', '10-run']
    """
    # Texts and numbers take turns, so that each is compared with its like.
    parts: list[str | int] = list(_NUMBER.split(str(path)))
    parts[1::2] = map(int, parts[1::2])
    return parts


def places_of(name: str, folder: Path) -> list[Path]:
    """Find which folders hold something of a name: one, and all below it, also behind links, in `natural_order`.

    Raises:
        ConfigurationError: One of the folders is closed to this user: its runs would be left out silently.
    """

    def refuse(error: OSError) -> None:
        if isinstance(error, PermissionError):
            raise ConfigurationError(
                f"{error.filename} cannot be read ({error.strerror}): make it readable, or move it away."
            ) from error

    seen: set[str] = set()
    places = []
    for place, inner, _ in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a second way to it, or a circle
            inner.clear()
            continue
        seen.add(real)
        if os.path.exists(os.path.join(place, name)):
            places.append(Path(place))
    return sorted(places, key=natural_order)
