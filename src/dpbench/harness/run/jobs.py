"""From the words of a command line to jobs: composed, all of them checked, then run here or by a launcher of Hydra.

Nothing is started and no folder is made before every job of a command has been checked.
"""

from __future__ import annotations

import os
import re
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpbench.errors import ClassNotFound, ConfigurationError, DPBenchError, Interrupted, brief
from dpbench.harness.run._command import Command, compose
from dpbench.harness.run._signals import SweepInterrupted, end_with, hand_back
from dpbench.harness.run.command_line import explain, hydra_for, parse, without_hydra
from dpbench.harness.run.hydra_folder import claim_run_folder, claim_sweep_folder, has_workers, optimizes, quoted
from dpbench.harness.run.processes import launched_process, together
from dpbench.harness.run.search_path import code_folder, imports_from, installing
from dpbench.harness.runs.command import key_of
from dpbench.harness.runs.folder import RunFolder, finished_runs_below
from dpbench.harness.runs.sweep import Sweep
from dpbench.options import Positive, Seed, Share, checked_value

Task: TypeAlias = Callable[[DictConfig], Any]
"""Function called with the configuration of each job."""
T = TypeVar("T")

_NUMBERS = {"seed": Seed, "strategy.delta": Share, "strategy.target_epsilon": Positive | None}
"""Settings that are checked first, before PyTorch is imported, which takes seconds."""
_FIXED_IN_RESUME = ("hydra.", "run.resume", "run.schema")
_RESUMED = "resumed_run"
_ABSENT = object()


def launch(
    words: Sequence[str],
    task: Task,
    name: str = "config",
    checked: bool = True,
    afterwards: Callable[[Sweep], None] | None = None,
) -> None:
    """Compose the configuration and run the job or the sweep; answer a question such as `--cfg job`.

    Args:
        words: Hydra overrides and flags.
        task: Function of each job's configuration.
        name: Primary configuration.
        checked: True if each job is a run, with a configuration that is checked before anything starts.
        afterwards: Reports on a sweep that has ended, whether or not runs of it have failed.

    Raises:
        ConfigurationError: The words do not compose, a run's configuration is wrong, a sweep has no run, or its
            sweeper may not choose.
        Interrupted: A signal.
    """
    flags = parse(words)
    code = code_folder(flags.config_dir)
    if flags.cfg is not None:
        with _errors_explained(), hydra_for(flags.config_dir) as hydra:
            hydra.show_cfg(name, flags.overrides, flags.cfg, flags.package, flags.resolve)
        return
    _refuse_processes(flags.multirun)
    with _composed(flags, name) as command:
        _refuse_processes(command.sweeps)  # which hydra.mode may say, too
        with together():
            jobs = _check(command) if checked else command.jobs()
        task = partial(_attempt, task, code, os.getpid())
        try:
            if command.sweeps:
                _run_sweep(command, task, jobs, afterwards, claims=checked)
            else:
                _run(command, task)
        except SweepInterrupted as interruption:
            raise interruption.error from None


def _refuse_processes(sweeps: bool) -> None:
    if sweeps and launched_process() is not None:
        raise ConfigurationError("a sweep is made by one process: start it without torchrun or srun's tasks.")


@contextmanager
def _composed(flags: Namespace, name: str) -> Iterator[Command]:
    """Compose a command, and keep Hydra and the user's own code at hand inside."""
    folder = code_folder(flags.config_dir)
    with _errors_explained(), imports_from(folder), hydra_for(flags.config_dir) as hydra:
        with together():
            command = compose(flags, hydra.config_loader, name)
        yield command


def check_run(words: Sequence[str]) -> DictConfig:
    """Compose one run without starting it, with the refusals of `launch`.

    Args:
        words: Hydra overrides.

    Returns:
        Its configuration, with Hydra's own.

    Raises:
        ConfigurationError: See `launch`.
    """
    return with_one_run(words, lambda cfg: cfg)


def with_one_run(words: Sequence[str], task: Callable[[DictConfig], T]) -> T:
    """Compose and check one run, and hand its configuration to a task, without a folder.

    Args:
        words: Hydra overrides and flags.
        task: A function of the configuration, with Hydra's own.

    Returns:
        The task's result.

    Raises:
        ConfigurationError: See `launch`; or the words ask for something else than one run.
    """
    flags = parse(words)
    with _composed(flags, "config") as command:
        if flags.cfg is not None or command.sweeps:
            raise ConfigurationError("this command takes a single run: remove -m and --cfg.")
        _check(command)
        return task(command.cfg)


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Within, errors of Hydra and OmegaConf become one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigurationError(explain(error)) from error


def resume(folder: Path, words: Sequence[str], task: Task) -> None:
    """Continue an interrupted run in its own folder, with its own configuration; a finished one with more steps.

    Args:
        folder: The run's folder.
        words: Hydra overrides, such as more steps.
        task: Function of its configuration.

    Raises:
        ConfigurationError: The folder holds no run, one that cannot be resumed, or a word would move it.
    """
    from dpbench.harness.run.saved_config import read_config, require_resumable

    with together():
        config = read_config(RunFolder(folder))
        require_resumable(RunFolder(folder), longer=bool(words))
    run = RunFolder(folder.resolve())
    for word in words:
        key = key_of(word)
        if key.startswith(_FIXED_IN_RESUME):
            raise ConfigurationError(
                f"{word} cannot be changed: a run is resumed in its own folder, {folder}. Leave it out."
            )
    place = [
        f"hydra.run.dir={quoted(run.path)}",
        "hydra.output_subdir=null",
        f"++hydra.job_logging.handlers.file.filename={quoted(run.log)}",
        "++hydra.job_logging.handlers.file.class=logging.FileHandler",  # absent where job_logging=disabled
        "+hydra.job_logging.handlers.file.delay=true",
        "hydra.job.name=train",
        "run.resume=true",
    ]
    ConfigStore.instance().store(_RESUMED, OmegaConf.create(config))
    launch([*place, *words], task, name=_RESUMED)


def _check(command: Command) -> list[list[str]]:
    """Check all jobs of a command; if a sweeper chooses them on the way, the first one.

    Returns:
        The words of each job of a sweep.
    """
    for name, annotation in _NUMBERS.items():
        value = OmegaConf.select(command.cfg, name, default=_ABSENT)
        if value is not _ABSENT:
            checked_value(annotation, value, name)
    from dpbench.harness.run._job_check import check_job
    from dpbench.harness.run._objective import refuse_choice

    settings = command.cfg.hydra
    if not command.sweeps:
        if has_workers(settings):
            launcher = settings.runtime.choices.get("launcher")
            raise ConfigurationError(
                f"launcher={launcher} is for sweeps, and this is a single run: add -m, or remove it."
            )
        _check_run(command.cfg)
        return []
    jobs = command.jobs()
    directions = _sweeper(command).directions() if optimizes(settings) else None
    for number, words in enumerate(jobs if directions is None else jobs[:1]):
        job = command.job(words, number)
        try:
            config = _check_run(job)
            if directions is not None:
                refuse_choice(config, directions)
            check_job(config, RunFolder(Path(str(job.hydra.sweep.dir))))
        except ConfigurationError as error:
            which = [word for word in words if key_of(word) in command.swept]
            raise ConfigurationError(f"{' '.join(which)}: {error}" if which else str(error)) from error
    return jobs


def _check_run(cfg: DictConfig) -> dict[str, Any]:
    # PyTorch is imported here: not for a question, nor for words that do not compose.
    from dpbench.harness.run.build import plain
    from dpbench.harness.run.config import check_config

    config = plain(without_hydra(cfg))
    check_config(config)
    return config


def _context(command: Command) -> HydraContext:
    return HydraContext(config_loader=command.loader, callbacks=Callbacks(command.cfg))


def _run(command: Command, task: Task) -> None:
    """Run a single job here."""
    claim_run_folder(command.cfg)
    job = run_job(
        task,
        command.cfg,
        job_dir_key="hydra.run.dir",
        job_subdir_key=None,
        hydra_context=_context(command),
    )
    if isinstance(job.return_value, Exception):
        raise job.return_value


def _run_sweep(
    command: Command,
    task: Task,
    jobs: list[list[str]],
    afterwards: Callable[[Sweep], None] | None,
    claims: bool,
) -> None:
    """Hand the jobs of a sweep to its launcher, and report on those that have a result.

    Args:
        command: The sweep.
        task: Function of each job's configuration.
        jobs: The words of each job.
        afterwards: Reports on the sweep.
        claims: True if the sweep has a folder of its own, with those of its runs below.
    """
    cfg = command.cfg
    settings = cfg.hydra
    searches = optimizes(settings)
    folder = claim_sweep_folder(cfg, command.swept) if claims else Path(str(settings.sweep.dir))
    earlier = finished_runs_below([folder]) if claims and not searches else ()
    study = settings.sweeper.study_name if searches and settings.sweeper.get("storage") else None
    sweep = Sweep(folder, command.swept, frozenset(run.path for run in earlier), study)
    if str(settings.launcher["_target_"]).endswith("JoblibLauncher"):
        task = partial(_ending_with, task, os.getpid())
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=_context(command),
        task_function=task,
        config=cfg,
    )

    def run_jobs(batch: list[list[str]], first: int = 0) -> list[Any]:
        return [_value(job) for job in launcher.launch(batch, initial_job_idx=first)]

    try:
        if searches:
            outcomes = _sweeper(command).search(command.task_overrides, folder, run_jobs)
        else:
            with _progress(sweep, len(jobs), claims and has_workers(settings)):
                outcomes = run_jobs(jobs)
    except (RuntimeError, ValueError) as error:
        if not type(error).__module__.startswith("submitit.") and "srun" not in str(error):
            raise
        raise _submitit_error(error) from error
    if afterwards is not None:
        afterwards(sweep)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if len(failures) > 1:
        raise DPBenchError(f"{len(failures)} runs of the sweep failed, the first of them: {failures[0]}")
    if failures:
        raise failures[0]


def _sweeper(command: Command) -> Any:
    from dpbench.harness.run.config import SWEEPER
    from dpbench.options import check_options

    settings: Any = OmegaConf.to_container(command.cfg.hydra.sweeper, resolve=True)
    try:
        cls = SWEEPER.class_of(settings, "hydra.sweeper")
    except ClassNotFound as error:
        if getattr(error.__cause__, "name", None) != "optuna":
            raise
        raise ConfigurationError(f"hydra/sweeper=optuna is not installed: {installing('optuna')}.") from error
    options = {name: value for name, value in settings.items() if name != "_target_"}
    return cls(**check_options(cls, options, "hydra.sweeper", is_complete=True))


def _attempt(task: Task, code: Path | None, parent: int, cfg: DictConfig) -> Any:
    """Run a job, and return an error of the user's as its value: Hydra would print it in its own words.

    Args:
        task: Function of the job's configuration.
        code: Folder of the user's own code, for the processes of launchers, which start some of their own.
        parent: Id of the process that was started. A signal to it ends all jobs.
        cfg: Configuration of the job.

    Raises:
        SweepInterrupted: A signal.
    """
    try:
        with imports_from(code):
            return task(cfg)
    except Interrupted as error:
        hand_back(error)
        if os.getpid() == parent and not error.is_time_limit:
            raise SweepInterrupted(error) from error
        return error
    except (DPBenchError, OSError) as error:
        return error


def _value(job: JobReturn) -> Any:
    """Return a job's result, or its error if a launcher gave it up."""
    try:
        return job.return_value
    except (DPBenchError, OSError) as error:
        return error


def _ending_with(task: Task, parent: int, cfg: DictConfig) -> Any:
    """Run a job in a worker of joblib, which saves and ends when the process that makes the sweep is gone."""
    if os.getpid() == parent:  # where n_jobs=1
        return task(cfg)
    end_with(parent, signal.SIGTERM)  # which asks for a last checkpoint
    try:
        return task(cfg)
    finally:
        end_with(parent, signal.SIGTERM)  # without a parent it would wait for another job for ever


def _progress(sweep: Sweep, jobs: int, shows: bool) -> AbstractContextManager[None]:
    """Count the runs that other processes make; a run that is made here has a bar of its own."""
    if not shows:
        return nullcontext()
    from dpbench.harness.run.progress import counting

    return counting(jobs, lambda: len(sweep.finished()))


def _submitit_error(error: RuntimeError | ValueError) -> ConfigurationError:
    """Shorten submitit's error to one line: Slurm's last word, or the first line."""
    of_slurm = [line.strip() for line in str(error).splitlines() if re.search("error: |fatal: ", line)]
    cause = [brief(error), *of_slurm][-1]
    return ConfigurationError(f"launcher=submitit: {cause.rstrip('.:')}.")
