"""Continuation of a run in its folder: after an interruption, with more steps, or when a scheduler restarts its job.

The folder belongs to one run, and its files are never mixed with another one's.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from dpbench.code import foreign_code
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.guards.earlier_fits import PRIVATE_PAST
from dpbench.harness.run.saved_config import read_config, require_resumable, with_later_options, write_config
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.harness.runs.readers import Record, read_checkpoint, read_json
from dpbench.harness.runs.record import is_audited, read_result

RAY_TASK = "DPBENCH_RAY_TASK"
"""Variable in which a job of `launcher=ray` has its name."""
# What decides nothing that a run with other steps would have had, and the budget, which may grow.
_MAY_CHANGE = ("trainer.", "run.", "logger.", "diagnostics.", "engine.", "objective", "strategy.target_epsilon")
_DECIDES_GRADIENTS = "trainer.precision"


def resuming(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run that is resumed."""
    return {**config, "run": {**config["run"], "resume": True}}


def prepare_folder(run: Run) -> Path | None:
    """Claim the folder of a new run, or find the checkpoint of the run to resume.

    Args:
        run: The run; its configuration is kept in the folder for `dpbench resume`.

    Returns:
        The checkpoint to start from, if any.

    Raises:
        ConfigurationError: The folder cannot be written, or holds another run.
    """
    if run.config["run"]["resume"]:
        return _checkpoint_to_resume(run)
    _claim(run)
    return None


def _claim(run: Run) -> None:
    folder = run.folder
    elsewhere = "choose another folder (hydra.run.dir; of a sweep: hydra.sweep.dir)"
    for path in (folder.result, folder.config):
        if path.exists():
            try:
                read_config(folder)
            except ConfigurationError:
                raise ConfigurationError(
                    f"{folder} holds a {path.name} that is damaged, or not of dpbench: {elsewhere}."
                ) from None
    if folder.result.exists():
        raise ConfigurationError(f"{folder} holds a finished run: {elsewhere}.")
    if folder.config.exists():
        raise ConfigurationError(
            f"{folder} holds an unfinished run: continue it with `{folder.command('resume')}`, or choose another "
            "folder."
        )
    for name, path in (("ledger", folder.ledger), ("checkpoint", folder.checkpoint)):
        if path.exists():
            raise ConfigurationError(f"{folder} holds the {name} of another run: {elsewhere}.")
    try:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        # The name of the job first: one that is killed between the two begins anew when it is started again.
        name_of_job = job_name()
        if name_of_job is not None:
            write_atomically(folder.job, name_of_job)
        write_config(run)
    except OSError as error:
        raise ConfigurationError(f"the run folder {folder} cannot be written: {error.strerror}.") from None


def _checkpoint_to_resume(run: Run) -> Path | None:
    folder = run.folder
    require_resumable(folder, longer=True)
    if not run.private and folder.ledger.exists():
        raise ConfigurationError(f"{folder} holds a private run: {PRIVATE_PAST}")
    MetricsCSV(folder).check()  # a damaged file is named now, not when the training is under way
    checkpoint = folder.checkpoint if folder.checkpoint.exists() else None
    if checkpoint is not None:
        steps = int(read_checkpoint(checkpoint, True, run.trust)["global_step"])
        limit = run.config["trainer"].get("max_steps", -1)
        if -1 < limit < steps:
            raise ConfigurationError(
                f"trainer.max_steps={limit} is less than the {steps} steps that {folder} has made: raise it, or "
                "remove it."
            )
    if folder.finished:
        _require_extendable(run)
    else:
        folder.evaluation.unlink(missing_ok=True)  # of a checkpoint on the way
    _warn_of_other_code(run)
    return checkpoint


def _warn_of_other_code(run: Run) -> None:
    """Say that the steps to come run other code than those before; their noise is another one, too (`run_key`)."""
    folder = run.folder
    path = folder.result if folder.finished else folder.partial_result
    if not path.is_file():  # a run that was killed
        return
    before = read_json(path, Record, "delete {path}, it is not needed").get("foreign_code", {})
    changed = [package for package, source in foreign_code(run.config).items() if before.get(package, source) != source]
    if changed:
        pl.utilities.rank_zero_warn(
            f"the code of {', '.join(changed)} has changed since {folder} was trained, and its next steps run the new "
            "code: for a result of a single version, train a new run."
        )


def _require_extendable(run: Run) -> None:
    """Check that a finished run can be made longer, and warn of differences from a run of that length.

    Noise and batches continue as before: noise that was solved for a budget is kept, and the budget ends the run.

    Args:
        run: The run with the settings of the longer one.

    Raises:
        ConfigurationError: It would not be longer, or other settings are asked for, or its audit was read.
    """
    folder = run.folder
    record = read_result(folder)
    steps = record["steps"]
    damage = record["privacy"].get("damage")
    if damage is not None:
        raise ConfigurationError(f"{folder}: {damage}. Restore the ledger, or train a new run.")
    if is_audited(record["config"]):
        raise ConfigurationError(
            f"{folder} was audited at its end: continuing after reading an audit would select the outcome of the "
            "next one. Train a new run of that many steps."
        )
    changed = []
    for key in _differences(with_later_options(record["config"]), run.config):
        if not key.startswith(_MAY_CHANGE) or key == _DECIDES_GRADIENTS:
            changed.append(key)
    if changed:
        raise ConfigurationError(
            f"{folder} is finished and can only be continued with its original settings: remove "
            f"{', '.join(sorted(changed))}, or train a new run."
        )
    if not folder.checkpoint.exists():
        raise ConfigurationError(f"{folder} has no checkpoint to continue from: train a new run.")
    if -1 < run.config["trainer"].get("max_steps", -1) <= steps:
        raise ConfigurationError(f"{folder} has made {steps} steps: raise trainer.max_steps.")
    schedule = run.config.get("schedule") or {}
    for name, value in schedule.items():
        if type(value) is int and value == steps:
            warnings.warn(
                f"the learning rate was planned for {steps} steps (schedule.{name}) and continues past its end as "
                f"{str(schedule['_target_']).rpartition('.')[2]} does: the result differs from a run planned for more "
                "steps.",
                stacklevel=2,
            )
            break


def _differences(first: Any, second: Any, key: str = "") -> list[str]:
    """Dotted keys in which two configurations differ."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return [] if first == second else [key]
    keys: list[str] = []
    for name in {**first, **second}:
        keys += _differences(first.get(name), second.get(name), f"{key}.{name}" if key else str(name))
    return keys


class Reopened(pl.Callback):
    """Turns a finished run into an interrupted run of the new length, at its first additional batch.

    Until then it can still be refused, and nothing of it has changed.

    Args:
        run: The run with the settings of the longer one.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keep the old record as that of an interrupted run, then write the new settings."""
        folder = self._run.folder
        if trainer.is_global_zero and folder.result.exists():
            folder.result.replace(folder.partial_result)
            folder.evaluation.unlink(missing_ok=True)
            config = self._run.config
            write_config(Run(folder, {**config, "run": {**config["run"], "resume": False}}, self._run.private))


def job_name() -> str | None:
    """Name of this process's job in the scheduler, which stays when the job is restarted; None without one."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        array = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    names = {
        "Ray": os.environ.get(RAY_TASK),
        "submitit": os.environ.get("SUBMITIT_LOCAL_JOB_ID"),
        "Slurm": array or os.environ.get("SLURM_JOB_ID"),
    }
    for scheduler, name in names.items():
        if name:
            return f"{scheduler} {name}"
    return None


def is_started_again(folder: RunFolder, config: dict[str, Any]) -> bool:
    """Tell whether a folder holds the run that this very job began: the scheduler has started it again.

    Args:
        folder: The run's folder.
        config: Its resolved configuration.
    """
    name = job_name()
    if name is None or not folder.job.is_file() or folder.job.read_text(encoding="utf-8") != name:
        return False
    try:
        return resuming(read_config(folder)) == resuming(config)
    except ConfigurationError:
        return False  # whoever wants the folder says what is wrong with it
