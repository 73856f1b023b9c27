"""Folders of Hydra's jobs.

Hydra makes folders that may exist and writes into them before the job begins. So names with a time in them are made
unique before Hydra sees them, Hydra writes nothing itself (`hydra.output_subdir=null`, a log that is opened late), and
the job writes once it holds the lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dpbench.errors import ConfigurationError
from dpbench.harness.run.processes import from_first_process, is_first
from dpbench.harness.runs.claim import keep_existing, make_new, remove_if_empty
from dpbench.harness.runs.folder import RunFolder


class UniqueFolders(Callback):
    """Takes away the empty folder of a job that was refused before it held it.

    Args:
        swept: Keys in which the jobs of a sweep differ: for the jobs, which see one value of each. `claim_sweep_folder`
            fills them in.
    """

    def __init__(self, swept: Sequence[str] = ()) -> None:
        self.swept = list(swept)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Remove the folder if it is empty, and was not there before."""
        if is_first():
            remove_if_empty(output_dir(config.hydra))


def claim_run_folder(config: DictConfig) -> None:
    """Prepare the folder of a single run: of several processes that were started, the first one's for all.

    Raises:
        OSError: It cannot be made.
    """
    folder = from_first_process(lambda: _claim(config, "run").absolute())
    if not is_first():
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.run.dir = str(folder)


def claim_sweep_folder(config: DictConfig, swept: Sequence[str]) -> Path:
    """Prepare the folder of a sweep; jobs compose their configuration anew, and are told by words of the command line.

    Args:
        config: The sweep's configuration.
        swept: Keys to which it gives several values.

    Raises:
        OSError: It cannot be made.
    """
    folder = _claim(config, "sweep")
    swept_word = f"++hydra.callbacks.folders.swept=[{','.join(map(quoted, swept))}]"
    with read_write(config.hydra.overrides):
        config.hydra.overrides.hydra.extend([swept_word, f"hydra.sweep.dir={quoted(folder)}"])
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "multirun.yaml")  # by which others know that runs below are of a sweep
    return folder


def has_workers(hydra: Any) -> bool:
    """Tell whether the jobs of a sweep are run by other processes than the one that started it.

    Args:
        hydra: Hydra's own configuration of the sweep.
    """
    return not str(hydra.launcher["_target_"]).endswith("BasicLauncher")


def optimizes(hydra: Any) -> bool:
    """Tell whether the sweeper of Hydra's configuration chooses by the values that runs return."""
    return not str(hydra["sweeper"]["_target_"]).endswith("BasicSweeper")


def quoted(path: Path | str) -> str:
    """Quote a path, with any characters in it, for Hydra's grammar."""
    text = re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", str(path))  # else an interpolation
    return str(QuotedString(text, Quote.single).with_quotes())


def output_dir(hydra: Any) -> Path:
    """Folder of the job, as Hydra wrote it down: `${...}` in it is part of the name."""
    raw: Any = OmegaConf.to_container(hydra.runtime, resolve=False)
    return Path(str(raw["output_dir"]))


def _claim(config: DictConfig, kind: str) -> Path:
    """Make the folder of a "run" or a "sweep", with the time in its name, and write its name there.

    A name without the time is the user's, and stays.
    """
    HydraConfig.instance().set_config(config)  # `${hydra:...}` in names needs it
    name = str(config.hydra[kind].dir or "")
    if not name.strip():
        raise ConfigurationError(f"hydra.{kind}.dir must be the path of a folder, not {name!r}.")
    folder = Path(name)
    template: Any = OmegaConf.to_container(config.hydra[kind], resolve=False)
    if "${now:" not in str(template["dir"]):
        keep_existing(folder)
        return folder
    folder = make_new(folder)
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra[kind].dir = str(folder)
    return folder


def hydra_files(cfg: DictConfig) -> dict[str, str]:
    """Files that Hydra would write into `.hydra`: how the configuration came about.

    Args:
        cfg: The composed configuration of the job.
    """
    hydra: Any = HydraConfig.instance().cfg
    nodes = {"config": cfg, "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    return {f"{name}.yaml": OmegaConf.to_yaml(node) for name, node in nodes.items()}


def write_hydra_files(folder: RunFolder, files: Mapping[str, str]) -> None:
    """Write the result of `hydra_files`; nothing if there are none (a library's run)."""
    for name, text in files.items():
        folder.hydra.mkdir(exist_ok=True)
        (folder.hydra / name).write_text(text, encoding="utf-8")
