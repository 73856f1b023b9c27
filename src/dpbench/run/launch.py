"""From command line words to Hydra jobs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dpbench.errors import ConfigurationError, DPBenchError, Interrupted, brief
from dpbench.options import did_you_mean
from dpbench.run.flags import asks, in_order, sweeps
from dpbench.run.hydra_folder import begun_sweep, made_apart, quoted, sweep_under_way
from dpbench.run.requeue import hand_back
from dpbench.run.saved_config import read_config, require_resumable
from dpbench.run.search_path import conf_dir, groups_of, installing, plugin_dirs, use_plugins
from dpbench.run.started import started, together
from dpbench.runs.command import key_of
from dpbench.runs.folder import RunFolder
from dpbench.runs.sweep import Sweep


class _SweepInterrupted(BaseException):
    """Ends a whole sweep: Hydra takes an ordinary exception for the end of one job and starts the next."""

    def __init__(self, error: Interrupted) -> None:
        super().__init__(str(error))
        self.error = error


_EXTRAS = {"submitit": "launcher", "ray": "launcher", "optuna": "sweeper"}
_SWEEPERS = {name: f"hydra-{name}-sweeper" for name in ("ax", "nevergrad")}
_OF_THE_RUN = ("run.resume", "run.schema")
_OF_THE_PLACE = ("hydra.run", "hydra.sweep", "hydra.mode", "hydra.output_subdir", "hydra.job.", *_OF_THE_RUN)


def launch(
    words: Sequence[str],
    job: Callable[[DictConfig], float | None],
    conf: Path | None = None,
    name: str = "config",
    checked: bool = True,
    afterwards: Callable[[Sweep], None] | None = None,
) -> int:
    """Compose the configuration and run the job or the sweep.

    Args:
        words: Hydra overrides and flags.
        job: What to run.
        conf: Folder of the configuration.
        name: Primary configuration in it.
        checked: Whether a job's configuration is that of a run, to be checked before anything starts.
        afterwards: Reports on a sweep that has ended, whether or not runs of it have failed.

    Raises:
        ConfigurationError: The words do not compose.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    use_plugins()
    conf = conf or conf_dir()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through; `cli` prints them
    failures: list[BaseException] = []
    here = os.getpid()

    def single(cfg: DictConfig) -> float | None:
        try:
            return job(cfg)
        except (DPBenchError, OSError, KeyboardInterrupt) as error:  # Hydra would print a line of its own before it
            failures.append(error)
            return None

    def swept(cfg: DictConfig) -> float | None:
        try:
            return job(cfg)
        except (DPBenchError, OSError) as error:
            if isinstance(error, Interrupted):
                hand_back(error)
            _leave_sweep(error, HydraConfig.get(), os.getpid() == here)
            failures.append(error)  # the other runs go on, and this one is told in the end
            return None

    task = swept if sweeps(words) else single
    before, sys.argv = sys.argv, ["dpbench train", *in_order(words)]
    begun_sweep()  # forget that of an earlier command of this process
    try:
        jobs = _checked(words, conf, name) if checked and not asks(words) else []
        with _reported(jobs, afterwards), _watched(len(jobs)):
            hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name=name)(task)()
    except _SweepInterrupted as stop:
        raise stop.error from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(one_line(error, words, conf, name)) from error
    finally:
        sys.argv = before
    return _told(failures)


def _checked(words: Sequence[str], conf: Path, name: str) -> list[list[str]]:
    """The overrides of each job, after all were checked; what is refused is told by one process of all."""
    from dpbench.run.preflight import preflight

    if started() is not None and sweeps(words):
        raise ConfigurationError("a sweep is made by one process: start it without torchrun or srun's tasks.")
    with together():
        return preflight(words, conf, name)


def _watched(jobs: int) -> AbstractContextManager[None]:
    """Show how far the runs of a sweep are; a sweeper that chooses on the way tells of its trials itself."""
    if not jobs:
        return nullcontext()
    from dpbench.run.watch import SweepProgress, watching

    return watching(SweepProgress(sweep_under_way, jobs))


def _of_others(error: RuntimeError | ValueError) -> DPBenchError | None:
    """What submitit or Optuna say, in one line; None if it is of somebody else."""
    if "srun" in str(error):
        return ConfigurationError("launcher=submitit needs Slurm (srun): here, take launcher=submitit_local.")
    if "Cannot overwrite study direction" in str(error):
        return ConfigurationError(
            "the study in hydra.sweeper.storage was begun with the other hydra.sweeper.direction: take the same one, "
            "or another hydra.sweeper.study_name."
        )
    if not type(error).__module__.startswith("submitit."):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.search("error: |fatal: ", line)][
        -1:
    ] or lines  # Slurm's last word, or what happened
    return ConfigurationError(f"launcher=submitit: {told[0].rstrip('.:')}.")


@contextmanager
def _reported(jobs: Sequence[Sequence[str]], afterwards: Callable[[Sweep], None] | None) -> Iterator[None]:
    """Report on the sweep, unless it is interrupted; where some runs fail, on those that have a result."""
    failed: DPBenchError | OSError | None = None
    try:
        yield
    except (DPBenchError, OSError) as error:
        if isinstance(error, Interrupted) and not error.of_one_run:
            raise
        failed = error
    except (RuntimeError, ValueError) as error:
        if (failed := _of_others(error)) is None:
            raise
    if afterwards is not None and (sweep := begun_sweep()) is not None:
        afterwards(replace(sweep, jobs=tuple(map(tuple, jobs))))
    if failed is not None:
        raise failed


def _leave_sweep(error: DPBenchError | OSError, hydra: Any, here: bool) -> None:
    """Raise an error where Hydra has to hear of it: in another process, of a sweeper that waits for a value.

    Args:
        error: Of a run.
        hydra: Its configuration of Hydra.
        here: Whether the run was made by the process that makes the sweep (joblib does so where n_jobs=1): there Hydra
            would keep an interruption to itself until all other runs are made.
    """
    from dpbench.run.objective import optimizes

    stop = error if isinstance(error, Interrupted) and not error.of_one_run else None
    if (made_apart(hydra) and not (stop and here)) or optimizes(hydra):
        raise error
    if stop is not None:
        raise _SweepInterrupted(stop) from error


def _told(failures: Sequence[BaseException]) -> int:
    """The exit status, or the first of the errors."""
    if len(failures) > 1:
        raise DPBenchError(f"{len(failures)} runs of the sweep failed, the first of them: {failures[0]}")
    if failures:
        raise failures[0]
    return 0


def launch_again(folder: Path, words: Sequence[str], job: Callable[[DictConfig], float | None]) -> int:
    """Continue an interrupted run in its own folder, with its own configuration; a finished one with more steps.

    Args:
        folder: Of the run.
        words: Hydra overrides, such as more steps.
        job: What to run.

    Raises:
        ConfigurationError: The folder holds no run, one that cannot be resumed, or a word would move it.
    """
    from dpbench.run.extension import asks_for_more

    with together():
        own = RunFolder(folder)
        config = read_config(own)
        require_resumable(own, asks_for_more(words, config))
    run = RunFolder(folder.resolve())
    for word in words:
        key = key_of(word)
        if key.startswith(_OF_THE_PLACE) or key in ("hydra", "run"):
            raise ConfigurationError(
                f"{word} cannot be changed: a run is resumed in its own folder, {folder}. Leave it out."
            )
    place = [
        f"hydra.run.dir={quoted(run.path)}",
        "hydra.output_subdir=null",
        f"++hydra.job_logging.handlers.file.filename={quoted(run.log)}",
        "+hydra.job_logging.handlers.file.delay=true",
        "hydra.job.name=train",
        "run.resume=true",
    ]
    if "split" in config["data"]:  # also where the file of an older run does not say it
        place.append(f"++data.split={config['data']['split']}")
    return launch([*place, *words], job, folder)


def one_line(error: BaseException, words: Sequence[str], conf: Path, name: str) -> str:
    """Hydra's message without its ornaments, with the nearest name that exists."""
    text = str(error)
    if (several := re.search(r"Ambiguous value for argument '(.*?)'", text)) is not None:
        key, _, values = several[1].partition("=")
        return (
            f"{several[1]} is several values: add -m for a sweep (dpbench train), or write {key}=[{values}] for a list."
        )
    if "missing EQUAL" in text:
        bad = [word for word in words if "=" not in word and not word.startswith("-")]
        return f"{' '.join(bad)!r} is no setting: write KEY=VALUE or GROUP=NAME (see dpbench train --help)."
    for extra, group in _EXTRAS.items():
        if f"hydra/{group}/{extra}" in text and find_spec(f"hydra_plugins.hydra_{extra}_{group}") is None:
            choice = f"{'hydra/' if group == 'sweeper' else ''}{group}={extra}"
            choice = next((word for word in words if word.startswith(choice)), choice)  # launcher=submitit_local
            return f"{choice} is not installed: {installing(extra)}."
    if "Could not find '" in text:
        return _unknown_choice(text, conf)
    if (unknown := re.search(r"Could not override '([\w.]+)'", text)) is not None:
        return _unknown_key(unknown[1], words, conf, name)
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    cause = " ".join(line for line in lines if not line.startswith(("object_type=", "reference_type=", "full_key:")))
    first = brief(error)
    where = getattr(error, "full_key", None)
    if where and (absent := re.search(r"Interpolation key '(.+?)' not found", text)) is not None:
        return f"{absent[1]} is missing: {where} takes its value from it."
    if where and "nterpolation" in cause:
        cause = f"{where}: {cause}"
    return cause if first in cause else f"{first}: {cause}"


def _unknown_choice(text: str, conf: Path) -> str:
    """Which names there are instead: of Hydra's own groups and of a user's folders too."""
    wanted = re.search(r"Could not find '(.*?)'", text)
    options = re.search(r"Available options in '(.*?)':\n((?:\t.*\n?)*)", text)
    path = wanted[1] if wanted else ""
    group = options[1] if options else path.rpartition("/")[0]
    choice = path.removeprefix(f"{group}/")
    listed = options[2].split() if options else []
    names = sorted({*listed, *groups_of(conf, *plugin_dirs()).get(group, [])})
    if group == "hydra/sweeper" and choice in _SWEEPERS:
        return f"{group}={choice} is not installed: pip install {_SWEEPERS[choice]}."
    known = f" Known: {', '.join(names)}." if names else ""
    prefix = f"{group}=" if group else ""
    hint = did_you_mean(choice, names, f"{group}=")
    return f"there is no {prefix or 'configuration '}{choice}.{hint}{known}"


def _unknown_key(key: str, words: Sequence[str], conf: Path, name: str) -> str:
    """Which keys there are instead, for the groups that the command line chose."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    groups = groups_of(conf, *plugin_dirs())
    pairs = [word.partition("=") for word in words]
    choices = [f"{group}={choice}" for group, _, choice in pairs if choice in groups.get(group, [])]
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        cfg = compose(name, choices, return_hydra_config=False)
    path, _, leaf = key.rpartition(".")
    node = OmegaConf.select(cfg, path) if path else cfg
    if not isinstance(node, DictConfig):
        return f"there is no key {key}. `dpbench train --cfg job` prints all keys."
    names = [str(option) for option in node if option != "_target_"]
    if leaf in names:
        return f"{key} cannot be set: another word (such as ~{path.partition('.')[0]}) takes it away."
    hint = did_you_mean(leaf, names, f"{path}.") if path else _suggested_setting(leaf, names, cfg)
    known = ", ".join(names) or "none, it has no options"
    return f"there is no key {key}.{hint} Known: {known}."


def _suggested_setting(name: str, names: Sequence[str], cfg: DictConfig) -> str:
    """What a word without its group may stand for: the setting of that name in a group, or a name that is close."""
    groups = {str(group): options for group, options in cfg.items() if isinstance(options, DictConfig)}
    for group, options in groups.items():
        if name in options:
            return f" Did you mean {group}.{name}?"
    close = did_you_mean(name, names)
    if close:
        return close
    strategy_first = sorted(groups, key=lambda group: group != "strategy")
    for group in strategy_first:
        options = groups[group]
        hint = did_you_mean(name, [str(option) for option in options], f"{group}.")
        if hint:
            return hint
    return ""
