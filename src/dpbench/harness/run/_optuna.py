"""`hydra/sweeper=optuna`: Optuna chooses each trial of a sweep by the results of earlier ones, by ask and tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
import yaml
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.utils import instantiate
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from dpbench.errors import ConfigurationError, Interrupted, brief
from dpbench.files import write_atomically
from dpbench.options import PositiveInt

RESULTS = "optimization_results.yaml"
STUDY = "study.log"
_ENDED = (TrialState.COMPLETE, TrialState.FAIL)
Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class OptunaSweeper:
    """The options of `hydra.sweeper`.

    Attributes:
        sampler: Class of Optuna's sampler, as `_target_`, and its options.
        direction: "minimize" or "maximize"; a list for several objectives.
        n_trials: Number of trials of the study, those of earlier commands included.
        n_jobs: Number of trials that are chosen at a time, and that a launcher may run at once.
        study_name: Name of the study in its storage.
        storage: URL of a database; None for a file in the folder of the sweep.
        params: Keys that are swept over, as on the command line.
    """

    sampler: dict[str, Any]
    direction: Direction | list[Direction]
    n_trials: PositiveInt
    n_jobs: PositiveInt
    study_name: str
    storage: str | None = None
    params: dict[str, Any] | None = None

    def directions(self) -> list[Direction]:
        """Direction of each objective."""
        return self.direction if isinstance(self.direction, list) else [self.direction]

    def search(
        self,
        overrides: Sequence[Override],
        folder: Path,
        run_jobs: Callable[[list[list[str]], int], list[Any]],
    ) -> list[Any]:
        """Run the trials that the study still lacks, and write the best of all to `optimization_results.yaml`.

        Args:
            overrides: Words of the command line, among them those with several values.
            folder: Folder of the sweep.
            run_jobs: Runs jobs, by the words of each and the number of the first; it returns for each the values of its
                objectives, or its error.

        Returns:
            Results of this command's trials.

        Raises:
            ConfigurationError: Optuna refuses the values between which it is to choose, or cannot open the study.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = dict(self.sampler)
        missing = self.n_trials
        if str(sampler.get("_target_")).endswith("GridSampler"):
            swept = [override for override in overrides if override.is_sweep_override()]
            sampler["search_space"] = {key.get_key_element(): list(key.sweep_string_iterator()) for key in swept}
            missing = min(missing, math.prod(map(len, sampler["search_space"].values())))
        study = self._study(folder)
        if sampler.get("seed") is not None:  # else a study that goes on would try the same again
            sampler["seed"] += len(study.trials)
        study.sampler = instantiate(sampler)
        missing -= len(study.get_trials(deepcopy=False, states=_ENDED))
        outcomes: list[Any] = []
        while missing > len(outcomes):
            trials = [study.ask() for _ in range(min(missing - len(outcomes), self.n_jobs))]
            jobs = [_words(trial, overrides) for trial in trials]
            values = run_jobs(jobs, trials[0].number)
            for trial, value in zip(trials, values, strict=True):
                _tell(study, trial, value)
            outcomes += values
        best = []
        for trial in study.best_trials:
            best.append({"trial": trial.number, "values": trial.values, "params": trial.params})
        write_atomically(folder / RESULTS, yaml.safe_dump(best, sort_keys=False))
        return outcomes

    def _study(self, folder: Path) -> optuna.Study:
        try:
            return optuna.create_study(
                storage=self.storage or JournalStorage(JournalFileBackend(str(folder / STUDY))),
                study_name=self.study_name,
                directions=self.directions(),
                load_if_exists=True,
            )
        except Exception as error:  # of a database's driver, or of what its file holds
            place = self.storage or folder / STUDY
            raise ConfigurationError(f"the study in {place} cannot be opened: {brief(error)}") from error


def _words(trial: optuna.Trial, overrides: Sequence[Override]) -> list[str]:
    """The command line of a trial: the overrides, with the values that Optuna chooses."""
    words = []
    for override in overrides:
        key = override.get_key_element()
        sweep = override.value()
        try:
            if isinstance(sweep, IntervalSweep):
                whole = {type(sweep.start), type(sweep.end)} == {int}
                suggest: Any = trial.suggest_int if whole else trial.suggest_float
                words.append(f"{key}={suggest(key, sweep.start, sweep.end, log='log' in sweep.tags)}")
            elif override.is_sweep_override():
                words.append(f"{key}={trial.suggest_categorical(key, list(override.sweep_string_iterator()))}")
            else:
                words.append(str(override.input_line))
        except ValueError as error:  # an interval that is none, or other choices than those of the study
            raise ConfigurationError(f"{override.input_line}: {brief(error)}") from error
    return words


def _tell(study: optuna.Study, trial: optuna.Trial, value: Any) -> None:
    # The grid's sampler raises one when it has noted the value, to stop a loop of Optuna's.
    with suppress(RuntimeError):
        if not isinstance(value, Exception):
            study.tell(trial, value)
        elif not isinstance(value, Interrupted):  # whose run waits for `dpbench resume`
            study.tell(trial, state=TrialState.FAIL)
