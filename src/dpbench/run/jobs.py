"""From the words of a command line to jobs: composed, all of them checked, then run here or by a launcher of Hydra.

Nothing is started and no folder is made before every job of a command has been checked.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import hydra
import hydra.utils
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from dpbench.errors import ConfigurationError, DPBenchError, Interrupted, brief
from dpbench.options import shown
from dpbench.run._hydra_internals import BasicSweeper, Callbacks
from dpbench.run._signals import end_with, hand_back
from dpbench.run.command_line import CommandLine, explain, read_overrides, without_hydra
from dpbench.run.hydra_folder import claim_run_folder, claim_sweep_folder, has_workers, is_named_by_time, quoted
from dpbench.run.processes import launched_process, together
from dpbench.run.runtime import without_collections
from dpbench.run.search_path import code_folder, conf_dir, imports_from, use_plugins
from dpbench.runs.command import key_of
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.sweep import Sweep

Task: TypeAlias = Callable[[DictConfig], float | None]
"""What is done with the configuration of each job."""

_MOST_JOBS = 10_000
_MOST_VALUES = 100  # of a key that are tried before a sweeper chooses among them
_PRE_DISPATCH = re.compile(r"all|\d*[1-9]\d*(\s*\*\s*n_jobs)?|n_jobs(\s*\*\s*\d*[1-9]\d*)?")
_FIXED_IN_RESUME = (
    "hydra.run",
    "hydra.sweep",
    "hydra.mode",
    "hydra.output_subdir",
    "hydra.job.",
    "run.resume",
    "run.schema",
)


class _SweepInterrupted(BaseException):
    """Ends a whole sweep: Hydra takes an ordinary exception for the end of one job and starts the next."""

    def __init__(self, error: Interrupted) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class _Command:
    """A command line, composed.

    Attributes:
        loader: Composes the jobs of a sweep.
        name: Primary configuration.
        cfg: Configuration of the run, or of the sweep, from which its jobs are composed.
        overrides: The words, parsed.
        sweeps: Whether it is a sweep.
    """

    loader: ConfigLoader
    name: str
    cfg: DictConfig
    overrides: list[Override]
    sweeps: bool

    def words(self, kind: str) -> list[str]:
        """Overrides as they were written (an interpolation in one is for the job): of the "task" or of "hydra"."""
        words: Any = OmegaConf.to_container(self.cfg.hydra.overrides, resolve=False)
        return [str(word) for word in words[kind]]


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
        task: What to do with each job's configuration.
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
    use_plugins()
    if line.mode == RunMode.MULTIRUN and launched_process() is not None:
        raise ConfigurationError("a sweep is made by one process: start it without torchrun or srun's tasks.")
    folder = None if line.flags.config_dir is None else code_folder(Path(line.flags.config_dir))
    if folder is not None:
        task = partial(_with_imports, task, folder)
    with _errors_explained(line, conf, name):
        if line.is_question:
            _answer(line, conf, name)
            return
        with imports_from(folder), line.loader(conf) as loader:
            with together():
                command = _compose(line, loader, name)
                jobs = _check(command) if checked else None
            if command.sweeps:
                _run_sweep(command, task, jobs, afterwards)
            else:
                _run(command, task)


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
    line = CommandLine.parse(words)
    conf = conf_dir()
    use_plugins()
    with _errors_explained(line, conf, "config"), line.loader(conf) as loader:
        command = _compose(line, loader, "config")
        _check(command)
        return command.cfg


@contextmanager
def _errors_explained(line: CommandLine, conf: Path, name: str) -> Iterator[None]:
    """Say in one line what Hydra or OmegaConf could not compose."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(explain(error, line, conf, name)) from error


def resume(folder: Path, words: Sequence[str], task: Task) -> None:
    """Continue an interrupted run in its own folder, with its own configuration; a finished one with more steps.

    Args:
        folder: Of the run.
        words: Hydra overrides, such as more steps.
        task: What to do with its configuration.

    Raises:
        ConfigurationError: The folder holds no run, one that cannot be resumed, or a word would move it.
    """
    with without_collections():
        from dpbench.run._resume import asks_for_more
        from dpbench.run.saved_config import read_config, require_resumable

    with together():
        config = read_config(RunFolder(folder))
        require_resumable(RunFolder(folder), asks_for_more(words, config))
    run = RunFolder(folder.resolve())
    for word in words:
        key = key_of(word)
        if key.startswith(_FIXED_IN_RESUME) or key in ("hydra", "run"):
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
    if "split" in config["data"]:  # also where the file of an older run does not say it
        place.append(f"++data.split={config['data']['split']}")
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


def _compose(line: CommandLine, loader: ConfigLoader, name: str) -> _Command:
    """Compose the run, or the sweep; an error that is none of Hydra's names the word."""
    overrides = read_overrides(line.overrides, loader)
    _check_choices(overrides, loader)
    try:
        # Whether several values make a sweep is known only with the configuration, where hydra.mode may stand.
        cfg = loader.load_configuration(name, list(line.overrides), line.mode, validate_sweep_overrides=False)
    except (HydraException, OmegaConfBaseException):
        raise
    except Exception as error:  # Hydra's own, where a word is something that it does not expect
        mark = getattr(error, "problem_mark", None)  # of YAML
        if mark is not None:
            raise ConfigurationError(f"{mark.name}, {brief(error)}.") from error
        suspects = [word for word in line.overrides if "hydra." in word] or line.overrides
        raise ConfigurationError(f"{' '.join(suspects)} cannot be composed: {brief(error)}") from error
    mode = RunMode.MULTIRUN if line.flags.multirun else cfg.hydra.mode or line.mode
    if line.flags.multirun and cfg.hydra.mode == RunMode.RUN:
        warnings.warn("-m makes a sweep, whatever hydra.mode says.", stacklevel=2)
    if cfg.hydra.mode != mode:
        with read_write(cfg.hydra):
            cfg.hydra.mode = mode
            cfg.hydra.overrides.hydra.append(f"hydra.mode={mode.name}")  # jobs are composed from these words
    HydraConfig.instance().set_config(cfg)
    for override in overrides:
        if override.is_sweep_override():
            _check_several(override, mode)
    return _Command(loader, name, cfg, overrides, mode == RunMode.MULTIRUN)


def _check_choices(overrides: Sequence[Override], loader: ConfigLoader) -> None:
    """A group takes one name: a list of them would merge files (a private strategy with none, say)."""
    for override in overrides:
        key = override.key_or_group
        if not key:
            raise ConfigurationError(f"invalid override {override.input_line!r}: expected KEY=VALUE or GROUP=NAME.")
        value = override.value()
        if key == "hydra.searchpath" and isinstance(value, list):
            _check_search_path(value)
        if override.is_sweep_override() or override.is_delete() or isinstance(value, str):
            continue
        names = loader.get_group_options(key)
        if names:
            raise ConfigurationError(f"{key} takes one name, not {shown(value)}. Known: {', '.join(names)}.")


def _check_several(override: Override, mode: RunMode) -> None:
    """Refuse several values of a key in a single run, and of Hydra's own keys anywhere."""
    if mode == RunMode.RUN:
        key, _, values = str(override.input_line).partition("=")
        as_list = f", or write {key}=[{values}] for a list" if isinstance(override.value(), ChoiceSweep) else ""
        raise ConfigurationError(
            f"{override.input_line} is several values: add -m for a sweep (dpbench train){as_list}."
        )
    if override.is_hydra_override() or override.key_or_group == "launcher":
        raise ConfigurationError(f"{override.input_line}: a sweep has one value of each of Hydra's own settings.")


def _check_search_path(entries: Sequence[Any]) -> None:
    """Hydra goes on without what is not there, and says so only in a log."""
    for entry in entries:
        kind, _, place = str(entry).partition("://")
        exists = True
        if kind == "file":
            exists = Path(place).is_dir()
        elif kind == "pkg":
            try:
                exists = find_spec(place.replace("/", ".").strip(".")) is not None
            except (ImportError, ValueError):
                exists = False
        if not exists:
            raise ConfigurationError(f"hydra.searchpath: there is no {entry} (or it is no folder).")


def _check(command: _Command) -> list[list[str]]:
    """Check whatever a command would run.

    Returns:
        The words of each job of a sweep; none of a single run, and where a sweeper chooses them on the way.
    """
    with without_collections():
        from dpbench.run._objective import optimizes, refuse_choice
        from dpbench.run.logs import require_installed  # noqa: F401 (with what `_check_run` needs)

    settings = command.cfg.hydra
    if not command.sweeps:
        for override in command.overrides:
            if override.key_or_group in ("launcher", "hydra/launcher") and override.value() != "basic":
                raise ConfigurationError(
                    f"{override.input_line} is for sweeps, and this is one run, made here: add -m, or remove it."
                )
        _check_folder_names(settings, "run.dir")
        _check_run(command.cfg)
        return []
    _check_folder_names(settings, "sweep.dir", "sweep.subdir")
    _check_launcher(settings.launcher)
    chooses = optimizes(settings)
    parameters = _sweeper_parameters(settings.sweeper)
    task = [override for override in command.overrides if not override.is_hydra_override()]
    overrides = [*read_overrides(parameters, command.loader), *task]
    if chooses:
        _check_sweeper(settings, overrides)
        jobs = _possible_trials(overrides)
    else:
        jobs = _without_options_of_others(command, overrides, _grid(settings.sweeper, overrides))
    folders = Counter[str]()
    for number, words in enumerate(jobs):
        # With the words of the command, and as a launcher will do it, but for the folder, which there is not yet.
        job = command.loader.load_sweep_config(command.cfg, words)
        with read_write(job.hydra.job), open_dict(job.hydra.job):
            job.hydra.job.num = number
            job.hydra.job.id = f"{job.hydra.job.name}_{number}"
        HydraConfig.instance().set_config(job)
        folders[str(job.hydra.sweep.subdir)] += 1
        config = _check_run(job)
        _check_time(settings.launcher, config["run"].get("max_time"))
        if chooses:
            direction = settings.sweeper.get("direction")
            refuse_choice(config, direction if isinstance(direction, str) else getattr(direction, "name", None))
    subdir, times = folders.most_common(1)[0]
    if times > 1 and not chooses and not is_named_by_time(settings, "sweep", "subdir"):
        raise ConfigurationError(
            f"{times} runs of the sweep would have one folder, hydra.sweep.subdir={subdir}: put ${{hydra.job.num}} "
            "in it."
        )
    if chooses:
        _check_study(settings.sweeper)
    return [] if chooses else jobs


def _check_run(cfg: DictConfig) -> dict[str, Any]:
    # PyTorch is imported here: not for a question, nor for words that do not compose.
    from dpbench.run.build import plain
    from dpbench.run.config import check_config, uses_wandb
    from dpbench.run.logs import environment_mode, require_installed

    config = plain(without_hydra(cfg))
    check_config(config)
    require_installed(config)
    if uses_wandb(config):
        environment_mode()
    return config


def _check_folder_names(settings: DictConfig, *keys: str) -> None:
    for key in keys:
        name: Any = OmegaConf.to_container(settings, resolve=False)
        for part in key.split("."):
            name = name[part] if isinstance(name, Mapping) else None
        if not isinstance(name, str) or not name.strip():
            raise ConfigurationError(f"hydra.{key} must be the path of a folder, not {shown(name)}.")


def _check_launcher(launcher: DictConfig) -> None:
    if launcher.get("n_jobs", 1) == 0:
        raise ConfigurationError("hydra.launcher.n_jobs=0 runs nothing: 2 runs two at a time, -1 one on each core.")
    ahead = str(launcher.get("pre_dispatch", "all"))
    if not _PRE_DISPATCH.fullmatch(ahead):
        raise ConfigurationError(f"hydra.launcher.pre_dispatch must be a number, 2*n_jobs or all, not {shown(ahead)}.")


def _check_time(launcher: DictConfig, max_time: str | None) -> None:
    """A run that means to stop by itself must do so before its queue ends it."""
    from dpbench.run._checkpoint import seconds_of

    minutes = launcher.get("timeout_min")
    if max_time is not None and minutes is not None and seconds_of(max_time) >= 60 * minutes:
        raise ConfigurationError(
            f"run.max_time={max_time} is no shorter than the queue's limit (hydra.launcher.timeout_min={minutes}), "
            "which would end the run before: make it shorter, or remove it, since the queue gives notice."
        )


def _sweeper_parameters(sweeper: DictConfig) -> list[str]:
    """What the sweeper's own configuration sweeps over, as words."""
    settings: Any = OmegaConf.to_container(sweeper, resolve=True)
    parameters = settings.get("params") or {}
    if not isinstance(parameters, Mapping) or not all(isinstance(v, str | int | float) for v in parameters.values()):
        raise ConfigurationError(
            "hydra.sweeper.params gives each key its values in one word, such as {seed: '0,1'}, not "
            f"{shown(parameters)}."
        )
    return [f"{key}={values}" for key, values in parameters.items()]


def _grid(sweeper: DictConfig, overrides: list[Override]) -> list[list[str]]:
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


def _without_options_of_others(
    command: _Command,
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
            # A word with + or ~ has its prefix before the key, and means what it says.
            if not word.startswith(prefixes) or _has(configuration, key):
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


def _check_sweeper(settings: DictConfig, overrides: Sequence[Override]) -> None:
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


def _check_study(sweeper: DictConfig) -> None:
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


def _possible_trials(overrides: Sequence[Override]) -> list[list[str]]:
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


def _run(command: _Command, task: Task) -> None:
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
    command: _Command,
    task: Task,
    jobs: Sequence[Sequence[str]] | None,
    afterwards: Callable[[Sweep], None] | None,
) -> None:
    """Hand the jobs of a sweep to its launcher, and report on those that have a result.

    Args:
        command: The sweep.
        task: What to do with each job's configuration.
        jobs: What `_check` gave; None of a sweep that makes its folders itself.
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
    sweeper = Plugins.instance().instantiate_sweeper(config=cfg, hydra_context=context, task_function=run)
    # Hydra's sweeper would compose each job only to see whether it can; they have been composed and checked.
    sweeper.validate_batch_is_legal = lambda batch: None  # type: ignore[method-assign]
    if jobs:
        size = cfg.hydra.sweeper.get("max_batch_size")
        # Those that were checked, not its own combinations: some leave out options that their choices do not have.
        sweeper.split_arguments = lambda *_: list(sweeper.split_overrides_to_chunks(jobs, size))  # type: ignore
    stop: DPBenchError | OSError | None = None
    try:
        with _progress(sweep):
            sweeper.sweep(arguments=command.words("task"))
        callbacks.on_multirun_end(config=cfg, config_name=command.name)
    except _SweepInterrupted as interruption:
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


def _begin(command: _Command, jobs: Sequence[Sequence[str]]) -> Sweep:
    """Make the folder of a sweep, and tell its jobs of it."""
    settings = command.cfg.hydra
    sweeper: Any = OmegaConf.to_container(settings.sweeper, resolve=False)
    swept = [str(key) for key in (*(sweeper.get("params") or {}), *(sweeper.get("search_space") or {}))]
    swept += [override.key_or_group for override in command.overrides if override.is_sweep_override()]
    keys = tuple(dict.fromkeys(swept))
    folder = claim_sweep_folder(command.cfg, keys)
    finished = frozenset(run.path for run in finished_runs_below([folder]))
    study = sweeper.get("study_name") if sweeper.get("storage") else None
    return Sweep(folder, keys, finished, study, tuple(map(tuple, jobs)), apart=has_workers(settings))


def _progress(sweep: Sweep | None) -> AbstractContextManager[None]:
    """Show how far the runs of a sweep are; a sweeper that chooses on the way tells of its trials itself."""
    if sweep is None or not sweep.jobs:
        return nullcontext()
    from dpbench.run.progress import SweepProgress, watching

    return watching(SweepProgress(sweep))


def _leave_sweep(error: DPBenchError | OSError, settings: Any, in_parent: bool) -> None:
    """Raise an error where Hydra has to hear of it: in another process, of a sweeper that waits for a value.

    Args:
        error: Of a run.
        settings: Hydra's configuration.
        in_parent: Whether the run was made by the process that makes the sweep (joblib does so where n_jobs=1): there
            Hydra would keep an interruption to itself until all other runs are made.
    """
    from dpbench.run._objective import optimizes

    stops_all = isinstance(error, Interrupted) and not error.is_time_limit
    if (has_workers(settings) and not (stops_all and in_parent)) or optimizes(settings):
        raise error
    if isinstance(error, Interrupted) and stops_all:
        raise _SweepInterrupted(error) from error


def _require_scheduler(launcher: DictConfig) -> None:
    if str(launcher["_target_"]).endswith("SlurmLauncher") and shutil.which("srun") is None:
        raise ConfigurationError("launcher=submitit needs Slurm (srun): here, take launcher=submitit_local.")


def _submitit_error(error: RuntimeError | ValueError) -> ConfigurationError:
    """What submitit says in many lines, in one: Slurm's last word, or what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_slurm = [line for line in lines if re.search("error: |fatal: ", line)]
    cause = [*lines[:1], *of_slurm][-1]
    return ConfigurationError(f"launcher=submitit: {cause.rstrip('.:')}.")
