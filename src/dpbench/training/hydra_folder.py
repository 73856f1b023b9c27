"""Folders of Hydra's jobs.

Hydra makes folders that may exist and writes into them before the job begins. So names with a time in them are made
unique before Hydra sees them, Hydra writes nothing itself (`hydra.output_subdir=null`, a log that is opened late), and
the job writes once it holds the lock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from dpbench.runs.claim import keep_existing, make_new, remove_if_empty
from dpbench.runs.folder import RunFolder


class UniqueFolders(Callback):
    """Gives runs and sweeps whose folder is named by the time a folder of their own: `-2`, `-3`, ... where it is taken.

    (Hydra takes the exception of a callback for a warning: what fails here fails again, and loudly, in Hydra.)
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Prepare the folder of a single run."""
        with suppress(OSError, OmegaConfBaseException):
            _claim(config, "run")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a sweep; jobs compose their configuration anew, from the words of the command line."""
        with suppress(OSError, OmegaConfBaseException):
            if own := _claim(config, "sweep"):
                with read_write(config.hydra.overrides):
                    config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted(own)}")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """After a job that was refused before it held its folder."""
        remove_if_empty(output_dir(config.hydra))


def quoted(path: Path | str) -> str:
    """A path as a word of Hydra's grammar that stands for itself, whatever letters are in it."""
    text = re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", str(path))  # else an interpolation
    return str(QuotedString(text, Quote.single).with_quotes())


def output_dir(hydra: Any) -> Path:
    """Folder of the job, as Hydra wrote it down: `${...}` in it is part of the name."""
    raw: Any = OmegaConf.to_container(hydra.runtime, resolve=False)
    return Path(str(raw["output_dir"]))


def _claim(config: DictConfig, kind: str) -> Path | None:
    """Make the folder that the configuration names by the time; None where the user chose the name."""
    template = OmegaConf.to_container(config.hydra[kind], resolve=False)["dir"]  # type: ignore[index, call-overload]
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)  # Hydra does so only afterwards, and `${hydra:...}` in names needs it
    try:
        wanted = Path(str(config.hydra[kind].dir))
    finally:
        HydraConfig.instance().cfg = before
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
