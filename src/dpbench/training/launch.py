"""From command line words to Hydra jobs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from dpbench.errors import ConfigurationError, DPBenchError, Interrupted, brief
from dpbench.runs.folder import RunFolder
from dpbench.training.hydra_folder import quoted
from dpbench.training.options import nearest
from dpbench.training.saved_config import require_resumable
from dpbench.training.search_path import conf_dir, groups_of, plugin_dirs, use_plugins


class _SweepInterrupted(BaseException):
    """Ends a whole sweep: Hydra takes an ordinary exception for the end of one job and starts the next."""

    def __init__(self, error: Interrupted) -> None:
        super().__init__(str(error))
        self.error = error


_EXTRAS = {"submitit": "launcher", "ray": "launcher", "optuna": "sweeper"}
_SWEEPERS = {name: f"hydra-{name}-sweeper" for name in ("ax", "nevergrad")}
_OF_THE_RUN = ("run.resume", "run.schema")
_OF_THE_PLACE = ("hydra.run", "hydra.sweep", "hydra.mode", "hydra.output_subdir", "hydra.job.", *_OF_THE_RUN)
_DISTRIBUTION = "dpbench-lightning"  # not "dpbench", which is another project on the package registry


def launch(
    words: Sequence[str],
    job: Callable[[DictConfig], float | None],
    conf: Path | None = None,
    name: str = "config",
    checked: bool = True,
) -> int:
    """Compose the configuration and run the job or the sweep.

    Args:
        words: Hydra overrides and flags.
        job: What to run.
        conf: Folder of the configuration.
        name: Primary configuration in it.
        checked: Whether a job's configuration is that of a run, to be checked before anything starts.

    Raises:
        ConfigurationError: The words do not compose.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from dpbench.training.preflight import in_order, preflight

    use_plugins()
    conf = conf or conf_dir()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through; `cli` prints them
    failures: list[BaseException] = []

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
            _leave_sweep(error, HydraConfig.get())
            failures.append(error)  # the other runs go on, and this one is told in the end
            return None

    task = swept if {"-m", "--multirun"} & set(words) else single
    before, sys.argv = sys.argv, ["dpbench train", *in_order(words)]
    try:
        if checked:
            preflight(words, conf, name)
        hydra.main(version_base="1.3", config_path=str(conf.resolve()), config_name=name)(task)()
    except _SweepInterrupted as stop:
        raise stop.error from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(_one_line(error, words, conf, name)) from error
    finally:
        sys.argv = before
    return _told(failures)


def _leave_sweep(error: DPBenchError | OSError, hydra: Any) -> None:
    """Raise an error where Hydra has to hear of it: in another process, of a sweeper that waits for a value."""
    from dpbench.training.objective import optimizes

    if not str(hydra.launcher["_target_"]).endswith("BasicLauncher") or optimizes(hydra):
        raise error
    if isinstance(error, Interrupted):
        raise _SweepInterrupted(error) from error


def _told(failures: Sequence[BaseException]) -> int:
    """The exit status, or the first of the errors."""
    if len(failures) > 1:
        raise DPBenchError(f"{len(failures)} runs of the sweep failed, the first of them: {failures[0]}")
    if failures:
        raise failures[0]
    return 0


def launch_again(folder: Path, words: Sequence[str], job: Callable[[DictConfig], float | None]) -> int:
    """Continue an interrupted run in its own folder, with its own configuration.

    Args:
        folder: Of the run.
        words: Hydra overrides, such as more steps.
        job: What to run.

    Raises:
        ConfigurationError: The folder holds no run, one that cannot be resumed, or a word would move it.
    """
    require_resumable(RunFolder(folder))
    run = RunFolder(folder.resolve())
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
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
    return launch([*place, *words], job, folder)


def _one_line(error: BaseException, words: Sequence[str], conf: Path, name: str) -> str:
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
        if f"hydra/{group}/{extra}" in text:
            choice = f"{'hydra/' if group == 'sweeper' else ''}{group}={extra}"
            return f"{choice} is not installed: {_installing(extra)}."
    if "Could not find '" in text:
        return _unknown_choice(text, conf)
    if (unknown := re.search(r"Could not override '([\w.]+)'", text)) is not None:
        return _unknown_key(unknown[1], words, conf, name)
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    cause = " ".join(line for line in lines if not line.startswith(("object_type=", "reference_type=", "full_key:")))
    first = brief(error)
    where = getattr(error, "full_key", None)
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
    return (
        f"there is no {group + '=' if group else 'configuration '}{choice}.{nearest(choice, names, group + '=')}{known}"
    )


def _installing(extra: str) -> str:
    """Command that installs an extra: in a checkout, or beside an installed wheel."""
    checkout = conf_dir().parent
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    return f'pip install "{_DISTRIBUTION}[{extra}]"'


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
    hint = nearest(leaf, names, f"{path}." if path else "")
    return f"there is no key {key}.{hint} Known: {', '.join(names) or 'none, it has no options'}."
