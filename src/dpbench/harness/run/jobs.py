"""From the words of a command line to jobs: composed, all of them checked, then run here or by a launcher of Hydra.

Nothing is started and no folder is made before every job of a command has been checked.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import hydra
import hydra.utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dpbench.errors import ConfigurationError, DPBenchError, Interrupted
from dpbench.harness.run._command import Command, compose
from dpbench.harness.run._hydra_internals import Callbacks
from dpbench.harness.run._signals import SweepInterrupted, end_with, hand_back
from dpbench.harness.run.command_line import CommandLine, explain, without_hydra
from dpbench.harness.run.hydra_folder import (
    claim_run_folder,
    claim_sweep_folder,
    has_workers,
    is_named_by_time,
    quoted,
)
from dpbench.harness.run.processes import launched_process, together
from dpbench.harness.run.search_path import code_folder, conf_dir, imports_from, use_plugins
from dpbench.harness.runs.command import key_of
from dpbench.harness.runs.folder import RunFolder, finished_runs_below
from dpbench.harness.runs.sweep import Sweep

Task: TypeAlias = Callable[[DictConfig], float | None]
"""What is done with the configuration of each job."""
T = TypeVar("T")

_FIXED_IN_RESUME = ("hydra.", "run.resume", "run.schema")


def launch(
    words: Sequence[str],
    task: Task,
    conf: Path | None = None,
    name: str = "config",
    checked: bool = True,
    afterwards: Callable[[Sweep], None] | None = None,
) -> None:
    """Compose the configuration and run the job or the sweep; answer a question such as `--cfg job`.

    Args:
        words: Hydra overrides and flags.
        task: Function of each job's configuration.
        conf: Folder of the configuration.
        name: Primary configuration in it.
        checked: Whether a job's configuration is that of a run, to be checked before anything starts.
        afterwards: Reports on a sweep that has ended, whether or not runs of it have failed.

    Raises:
        ConfigurationError: The words do not compose, a run's configuration is wrong, a sweep has no run, or its
            sweeper may not choose.
    """
    line = CommandLine.parse(words)
    conf = conf or conf_dir()
    name = line.flags.config_name or name
    folder = _code_folder(line)
    _refuse_processes(line.flags.multirun)
    if line.is_question:
        use_plugins()
        with _errors_explained(line):
            _answer(line, conf, name)
        return
    if folder is not None:
        task = partial(_with_imports, task, folder)
    with _composed(line, conf, name) as command:
        _refuse_processes(command.sweeps)
        with together():
            jobs = _check(command) if checked else None
        if command.sweeps:
            _run_sweep(command, task, jobs, afterwards)
        else:
            _run(command, task)


def _refuse_processes(sweeps: bool) -> None:
    if sweeps and launched_process() is not None:
        raise ConfigurationError("a sweep is made by one process: start it without torchrun or srun's tasks.")


def _code_folder(line: CommandLine) -> Path | None:
    return None if line.flags.config_dir is None else code_folder(Path(line.flags.config_dir))


@contextmanager
def _composed(line: CommandLine, conf: Path, name: str) -> Iterator[Command]:
    """Compose a command, and keep Hydra and the user's own code at hand inside."""
    use_plugins()
    with _errors_explained(line), imports_from(_code_folder(line)), line.loader(conf) as loader:
        with together():
            command = compose(line, loader, name)
        yield command


def _with_imports(task: Task, folder: Path, cfg: DictConfig) -> float | None:
    """Run a job in whatever process a launcher has started for it: submitit and Ray start some of their own."""
    with imports_from(folder):
        return task(cfg)


def check_run(words: Sequence[str]) -> DictConfig:
    """Compose one run without starting it, and refuse whatever `launch` refuses.

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
    line = CommandLine.parse(words)
    with _composed(line, conf_dir(), "config") as command:
        if line.is_question or command.sweeps:
            raise ConfigurationError("one run is asked for here: leave out -m and Hydra's questions such as --cfg.")
        _check(command)
        return task(command.cfg)


@contextmanager
def _errors_explained(line: CommandLine) -> Iterator[None]:
    """Say in one line what Hydra or OmegaConf could not compose."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigurationError(explain(error, line)) from error


def resume(folder: Path, words: Sequence[str], task: Task) -> None:
    """Continue an interrupted run in its own folder, with its own configuration; a finished one with more steps.

    Args:
        folder: The run's folder.
        words: Hydra overrides, such as more steps.
        task: Function of its configuration.

    Raises:
        ConfigurationError: The folder holds no run, one that cannot be resumed, or a word would move it.
    """
    from dpbench.harness.run.saved_config import later_words, read_config, require_resumable

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
        *later_words(config),
    ]
    launch([*place, *words], task, folder)


def _answer(line: CommandLine, conf: Path, name: str) -> None:
    """Let Hydra answer a question: it reads the words of the process."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through, instead of printing them and leaving
    before = sys.argv
    sys.argv = ["dpbench train", *line.in_order]
    try:
        hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name=name)(lambda cfg: None)()
    finally:
        sys.argv = before


def _check(command: Command) -> list[list[str]]:
    """Check whatever a command would run.

    Returns:
        The words of each job of a sweep; none of a single run, and where a sweeper chooses them on the way.
    """
    from dpbench.harness.run._job_check import check_job
    from dpbench.harness.run._objective import optimizes, refuse_choice

    settings = command.cfg.hydra
    if not command.sweeps:
        for override in command.overrides:
            if override.key_or_group in ("launcher", "hydra/launcher") and override.value() != "basic":
                raise ConfigurationError(
                    f"{override.input_line} is for sweeps, and this is one run, made here: add -m, or remove it."
                )
        _check_run(command.cfg)
        return []
    if optimizes(settings):
        _refuse_other_sweep(settings)
        config = _check_run(_job(command, command.first_trial(), 0))
        direction = settings.sweeper.get("direction")
        refuse_choice(config, getattr(direction, "name", direction))
        return []
    jobs = command.combinations()
    for number, words in enumerate(jobs):
        job = _job(command, words, number)
        config = _check_run(job)
        try:
            check_job(config, RunFolder(Path(str(job.hydra.sweep.dir))))
        except ConfigurationError as error:
            which = [word for word in words if key_of(word) in command.swept]
            raise ConfigurationError(f"{' '.join(which)}: {error}" if which else str(error)) from error
    return jobs


def _job(command: Command, words: Sequence[str], number: int) -> DictConfig:
    """Compose a job of a sweep as a launcher will do it, but for the folder, which there is not yet."""
    job = command.loader.load_sweep_config(command.cfg, list(words))
    with read_write(job.hydra.job), open_dict(job.hydra.job):
        job.hydra.job.num = number
        job.hydra.job.id = f"{job.hydra.job.name}_{number}"
    HydraConfig.instance().set_config(job)
    return job


def _refuse_other_sweep(settings: DictConfig) -> None:
    """Refuse a sweeper that chooses in the folder of another sweep."""
    folder = Path(str(settings.sweep.dir))
    # One that is named by the time will be a new one.
    if not is_named_by_time(settings, "sweep") and next(folder.rglob(RunFolder.lock), None) is not None:
        raise ConfigurationError(
            f"{folder} holds runs of another sweep, and what that one chose would be written over: name another folder "
            "(hydra.sweep.dir)."
        )


def _check_run(cfg: DictConfig) -> dict[str, Any]:
    # PyTorch is imported here: not for a question, nor for words that do not compose.
    from dpbench.harness.run.build import plain
    from dpbench.harness.run.config import check_config

    config = plain(without_hydra(cfg))
    check_config(config)
    return config


def _run(command: Command, task: Task) -> None:
    """Run a single job here."""
    failures: list[BaseException] = []

    def run(cfg: DictConfig) -> float | None:
        try:
            return task(cfg)
        except (DPBenchError, OSError, KeyboardInterrupt) as error:
            failures.append(error)  # raised below: Hydra would print a line of its own before it
            return None

    cfg = command.cfg
    configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    claim_run_folder(cfg)
    callbacks = Callbacks(cfg)
    callbacks.on_run_start(config=cfg, config_name=command.name)
    context = HydraContext(config_loader=command.loader, callbacks=callbacks)
    result = run_job(run, cfg, job_dir_key="hydra.run.dir", job_subdir_key=None, hydra_context=context)
    callbacks.on_run_end(config=cfg, config_name=command.name, job_return=result)
    if failures:
        raise failures[0]
    _ = result.return_value  # raises what is no error of a user


def _run_sweep(
    command: Command,
    task: Task,
    jobs: Sequence[Sequence[str]] | None,
    afterwards: Callable[[Sweep], None] | None,
) -> None:
    """Hand the jobs of a sweep to its launcher, and report on those that have a result.

    Args:
        command: The sweep.
        task: Function of each job's configuration.
        jobs: The result of `_check`; None for a sweep that makes its folders itself.
        afterwards: Reports on the sweep.
    """
    cfg = command.cfg
    failures: list[DPBenchError | OSError] = []
    parent = os.getpid()
    if str(cfg.hydra.launcher["_target_"]).endswith("JoblibLauncher"):
        task = _ending_with(parent, task)

    def run(cfg: DictConfig) -> float | None:
        try:
            return task(cfg)
        except (DPBenchError, OSError) as error:
            if isinstance(error, Interrupted):
                hand_back(error)
            _leave_sweep(error, HydraConfig.get(), os.getpid() == parent)
            failures.append(error)  # the others of the sweep go on, and this one is told in the end
            return None

    _require_scheduler(cfg.hydra.launcher)
    configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    sweep = _begin(command, jobs) if jobs is not None else None
    callbacks = Callbacks(cfg)
    callbacks.on_multirun_start(config=cfg, config_name=command.name)
    context = HydraContext(config_loader=command.loader, callbacks=callbacks)
    sweeper: Any = Plugins.instance().instantiate_sweeper(config=cfg, hydra_context=context, task_function=run)
    # Hydra's sweeper would compose each job only to see whether it can; they have been composed and checked.
    sweeper.validate_batch_is_legal = lambda batch: None
    stop: DPBenchError | OSError | None = None
    try:
        with _progress(sweep, cfg.hydra):
            sweeper.sweep(arguments=command.task_words())
        callbacks.on_multirun_end(config=cfg, config_name=command.name)
    except SweepInterrupted as interruption:
        raise interruption.error from None
    except (DPBenchError, OSError) as error:
        if isinstance(error, Interrupted) and not error.is_time_limit:
            raise
        stop = error
    except (RuntimeError, ValueError) as error:
        if not type(error).__module__.startswith("submitit."):
            raise
        stop = _submitit_error(error)
    if afterwards is not None and sweep is not None:
        afterwards(sweep)
    if stop is not None:
        raise stop
    if len(failures) > 1:
        raise DPBenchError(f"{len(failures)} runs of the sweep failed, the first of them: {failures[0]}")
    if failures:
        raise failures[0]


def _ending_with(parent: int, task: Task) -> Task:
    """The task in workers of joblib, which save and end when the process that makes the sweep is gone."""

    def run(cfg: DictConfig) -> float | None:
        if os.getpid() == parent:  # where n_jobs=1
            return task(cfg)
        end_with(parent, signal.SIGTERM)  # which asks for a last checkpoint
        try:
            return task(cfg)
        except Interrupted as error:
            if os.getppid() != parent:
                print(f"dpbench: {error}", file=sys.stderr, flush=True)  # nobody else would
            raise
        finally:
            end_with(parent, signal.SIGTERM)  # without a parent it would wait for another job for ever

    return run


def _begin(command: Command, jobs: Sequence[Sequence[str]]) -> Sweep:
    """Make the folder of a sweep, and tell its jobs of it."""
    settings = command.cfg.hydra
    folder = claim_sweep_folder(command.cfg, command.swept)
    finished = frozenset(run.path for run in finished_runs_below([folder]))
    study = settings.sweeper.get("study_name") if settings.sweeper.get("storage") else None
    return Sweep(folder, command.swept, finished, study, tuple(map(tuple, jobs)))


def _progress(sweep: Sweep | None, settings: Any) -> AbstractContextManager[None]:
    """Count the runs that other processes make; a run that is made here has a bar of its own."""
    if sweep is None or not sweep.jobs or not has_workers(settings):
        return nullcontext()
    from dpbench.harness.run.progress import counting

    return counting(len(sweep.jobs), lambda: len(sweep.finished()))


def _leave_sweep(error: DPBenchError | OSError, settings: Any, in_parent: bool) -> None:
    """Raise an error where Hydra has to hear of it: in another process, of a sweeper that waits for a value.

    Args:
        error: The error of a run.
        settings: Hydra's configuration.
        in_parent: Whether the run was made by the process that makes the sweep (joblib does so where n_jobs=1): there
            Hydra would keep an interruption to itself until all other runs are made.
    """
    from dpbench.harness.run._objective import optimizes

    stops_all = isinstance(error, Interrupted) and not error.is_time_limit
    if (has_workers(settings) and not (stops_all and in_parent)) or optimizes(settings):
        raise error
    if isinstance(error, Interrupted) and stops_all:
        raise SweepInterrupted(error) from error


def _require_scheduler(launcher: DictConfig) -> None:
    if str(launcher["_target_"]).endswith("SlurmLauncher") and shutil.which("srun") is None:
        raise ConfigurationError("launcher=submitit needs Slurm (srun): here, take launcher=submitit_local.")


def _submitit_error(error: RuntimeError | ValueError) -> ConfigurationError:
    """Shorten submitit's error to one line: Slurm's last word, or the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_slurm = [line for line in lines if re.search("error: |fatal: ", line)]
    cause = [*lines[:1], *of_slurm][-1]
    return ConfigurationError(f"launcher=submitit: {cause.rstrip('.:')}.")
