"""Folders of Hydra's jobs.

Hydra makes folders that may exist and writes into them before the job begins. So names with a time in them are made
unique before Hydra sees them, Hydra writes nothing itself (`hydra.output_subdir=null`, a log that is opened late), and
the job writes once it holds the lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from dpbench.errors import DPBenchError
from dpbench.run.started import is_first, of_first
from dpbench.runs.claim import keep_existing, make_new, remove_if_empty
from dpbench.runs.folder import RunFolder, finished_runs_below
from dpbench.runs.sweep import Sweep

_begun: list[Sweep] = []  # by this process: Hydra makes the callback itself, and hands nothing back


class UniqueFolders(Callback):
    """Gives runs and sweeps whose folder is named by the time a folder of their own: `-2`, `-3`, ... where it is taken.

    (Hydra takes the exception of a callback for a warning: what fails here fails again, and loudly, in Hydra.)

    Args:
        swept: Keys in which the jobs of a sweep differ: for the jobs, which see one value of each. Filled in here.
    """

    def __init__(self, swept: Sequence[str] = ()) -> None:
        self.swept = list(swept)

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Prepare the folder of a single run: of several processes that were started, the first one's for all."""
        with suppress(OSError, OmegaConfBaseException, RuntimeError, DPBenchError):
            wanted = _place(config, "run")
            own = of_first(lambda: Path.absolute(_claim(config, "run", wanted) or wanted))
            if not is_first():
                with read_write(config.hydra), open_dict(config.hydra):
                    config.hydra.run.dir = str(own)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a sweep; jobs compose their configuration anew, from the words of the command line."""
        with suppress(DPBenchError, OSError, HydraException, OmegaConfBaseException):
            wanted = _place(config, "sweep")
            if own := _claim(config, "sweep", wanted):
                _tell_jobs(config, f"hydra.sweep.dir={quoted(own)}")
            swept = _swept(config.hydra)
            _tell_jobs(config, f"++hydra.callbacks.folders.swept=[{','.join(map(quoted, swept))}]")
            folder = own or wanted
            before = frozenset(run.path for run in finished_runs_below([folder]))
            own_study = config.hydra.sweeper.get("study_name") if config.hydra.sweeper.get("storage") else None
            _begun.append(Sweep(folder, tuple(swept), before, own_study, apart=made_apart(config.hydra)))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """After a job that was refused before it held its folder."""
        if is_first():
            remove_if_empty(output_dir(config.hydra))


def made_apart(hydra: Any) -> bool:
    """Whether the jobs of a sweep are made by other processes than the one that started it."""
    return not str(hydra.launcher["_target_"]).endswith("BasicLauncher")


def sweep_under_way() -> Sweep | None:
    """The sweep that this process makes."""
    return _begun[-1] if _begun else None


def begun_sweep() -> Sweep | None:
    """The sweep that this process has begun since it was last asked."""
    sweep = _begun[-1] if _begun else None
    _begun.clear()
    return sweep


def quoted(path: Path | str) -> str:
    """A path as a word of Hydra's grammar that stands for itself, whatever letters are in it."""
    text = re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", str(path))  # else an interpolation
    return str(QuotedString(text, Quote.single).with_quotes())


def output_dir(hydra: Any) -> Path:
    """Folder of the job, as Hydra wrote it down: `${...}` in it is part of the name."""
    raw: Any = OmegaConf.to_container(hydra.runtime, resolve=False)
    return Path(str(raw["output_dir"]))


def _tell_jobs(config: DictConfig, word: str) -> None:
    with read_write(config.hydra.overrides):
        config.hydra.overrides.hydra.append(word)


def _swept(hydra: DictConfig) -> list[str]:
    """Keys that a sweep gives several values, on the command line or in its sweeper's parameters."""
    words: Any = OmegaConf.to_container(hydra.overrides, resolve=False)
    parsed = OverridesParser.create().parse_overrides([str(word) for word in words["task"]])
    params: Any = OmegaConf.to_container(hydra.sweeper, resolve=False)
    swept = [one.key_or_group for one in parsed if one.is_sweep_override()]
    own = (*(params.get("params") or {}), *(params.get("search_space") or {}))
    return list(dict.fromkeys([*map(str, own), *swept]))


def _place(config: DictConfig, kind: str) -> Path:
    """The folder that the configuration names."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)  # Hydra does so only afterwards, and `${hydra:...}` in names needs it
    try:
        return Path(str(config.hydra[kind].dir))
    finally:
        HydraConfig.instance().cfg = before


def _claim(config: DictConfig, kind: str, wanted: Path) -> Path | None:
    """Make the folder that the configuration names by the time; None where the user chose the name."""
    template = OmegaConf.to_container(config.hydra[kind], resolve=False)["dir"]  # type: ignore[index, call-overload]
    if "${now:" not in str(template):
        keep_existing(wanted)
        return None
    own = make_new(wanted)
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra[kind].dir = str(own)
    return own


def hydra_files(cfg: DictConfig) -> dict[str, str]:
    """Files that Hydra would write into `.hydra`: how the configuration came about.

    Args:
        cfg: The composed configuration of the job.
    """
    hydra: Any = HydraConfig.instance().cfg
    nodes = {"config": cfg, "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    return {f"{name}.yaml": OmegaConf.to_yaml(node) for name, node in nodes.items()}


def write_hydra_files(folder: RunFolder, files: Mapping[str, str]) -> None:
    """Write what `hydra_files` gave; nothing where there are none (a library's run)."""
    for name, text in files.items():
        folder.hydra.mkdir(exist_ok=True)
        (folder.hydra / name).write_text(text, encoding="utf-8")


def folder_key() -> str:
    """The setting that says where the run at hand lies: a job of a sweep is moved with its sweep."""
    swept = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
    return "hydra.sweep.dir" if swept else "hydra.run.dir"
