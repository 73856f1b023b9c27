"""The folder of a run: no other run's, locked while a process trains in it, and left as it was by a refused one.

Hydra makes folders that may exist and writes into them before the job begins. So names with a time in them are made
unique before Hydra sees them, Hydra writes nothing itself (`hydra.output_subdir=null`, a log that is opened late), and
the job writes once it holds the lock.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from dpbench.errors import ConfigurationError, DiskFull, DPBenchError
from dpbench.locks import open_locked
from dpbench.results.ledgers import CHECKPOINT, LEDGER

LOCK = ".lock"
_OURS = {".hydra", "train.log", "checkpoints", "config.yaml", "wandb", LOCK}
_found: set[Path] = set()  # folders that are not ours to remove: there before Hydra, or ours no more


class UniqueFolders(Callback):
    """Gives runs and sweeps whose folder is named by the time a folder of their own: `-2`, `-3`, ... where it is taken.

    (Hydra takes the exception of a callback for a warning: what fails here fails again, and loudly, in Hydra.)
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a single run."""
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
        folder = output_dir(config.hydra)
        if folder.resolve() not in _found:
            with suppress(OSError):  # not empty
                folder.rmdir()


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
        if wanted.exists():
            _found.add(wanted.resolve())
        return None
    own = make_new(wanted)
    _found.discard(own.resolve())  # an earlier job of this process may have had one of that name
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra[kind].dir = str(own)
    return own


def make_new(folder: Path) -> Path:
    """Make a folder that nobody else has: of that name, or with the first free number from 2 on behind it.

    Raises:
        OSError: It cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        own = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            own.mkdir()
            return own
    raise AssertionError


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for the training of this process; it is made if it is not there.

    If the run is refused or stopped before it has trained, what this process wrote is taken away again.

    Raises:
        ConfigurationError: Another process trains in it, or it cannot be written.
    """
    lock = _lock(folder)
    before = {path.name for path in folder.iterdir()} - {LOCK}
    try:
        yield
    except (DPBenchError, KeyboardInterrupt):
        _take_back(folder, before)
        raise
    finally:
        lock.close()


def _lock(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # somebody whose run was refused took the folder away at this moment
            return open_locked(folder / LOCK)
        folder.mkdir(parents=True, exist_ok=True)
        return open_locked(folder / LOCK)
    except BlockingIOError:
        raise ConfigurationError(
            f"another process trains in {folder}: wait until it ends, or choose another folder (hydra.run.dir)."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"the run folder {folder} cannot be written: {error.strerror}.") from None


def _take_back(folder: Path, before: set[str]) -> None:
    if any((folder / name).exists() for name in (LEDGER, "metrics.csv", CHECKPOINT)):
        return
    names = {path.name for path in folder.iterdir()}
    if not before and names <= _OURS and folder.resolve() not in _found | {Path.cwd()}:
        hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
        with suppress(OSError):
            _found.add(folder.resolve())
            folder.rename(hidden)  # at once: whoever wants the folder now makes a new one
            shutil.rmtree(hidden)
        return
    for name in (names & _OURS) - before:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def told_of_full_disk(folder: Path) -> Iterator[None]:
    """Say what a full disk has cost, whichever file it was that did not fit.

    Raises:
        DiskFull: In place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) and "temporary directory" not in str(error):
            raise
        name = str(error.filename2 or error.filename or "")  # a copy names its source first
        place = name if os.sep in name else f"{folder}, or of the system's temporary files ($TMPDIR)"
        kept = "ledger and last checkpoint are kept" if (folder / CHECKPOINT).exists() else "there is no checkpoint yet"
        raise DiskFull(
            f"no space left on the disk of {place}: what should have been written now is lost, {kept}. Free some "
            f"space, and go on with: dpbench resume {folder}"
        ) from error


def hydra_files(cfg: DictConfig) -> dict[str, str]:
    """What Hydra would write into `.hydra`: how the configuration came about.

    Args:
        cfg: The composed configuration of the job.
    """
    hydra: Any = HydraConfig.instance().cfg
    nodes = {"config": cfg, "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    return {f"{name}.yaml": OmegaConf.to_yaml(node) for name, node in nodes.items()}


def write_hydra_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write them; nothing where there are none (a library's run)."""
    for name, text in files.items():
        (folder / ".hydra").mkdir(exist_ok=True)
        (folder / ".hydra" / name).write_text(text, encoding="utf-8")
