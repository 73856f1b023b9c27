"""A run's folder is no other run's: made new, locked while a process trains in it, left as it was by a refused run."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, DiskFull, DPBenchError
from dpbench.files import is_full_disk
from dpbench.harness.runs.folder import RunFolder
from dpbench.locks import open_locked

_OURS = {RunFolder.hydra, RunFolder.log, RunFolder.checkpoints, RunFolder.config, RunFolder.wandb}
_OURS |= {RunFolder.lock, RunFolder.job, RunFolder.loggers}
_made: set[Path] = set()  # folders above those of this process's runs
_not_removed: set[Path] = set()  # folders that were there before this process's run, or have been given up by it


def make_new(folder: Path) -> Path:
    """Make a new folder of a name, or of the name with the first free number from 2 on.

    Raises:
        OSError: It cannot be made.
    """
    _made.update(parent for parent in folder.absolute().parents if not parent.exists())
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        free = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            free.mkdir()
            _not_removed.discard(free.resolve())  # an earlier job of this process may have had one of that name
            return free
    raise AssertionError


def keep_existing(folder: Path) -> None:
    """Never remove this folder, if it is there: a user chose it, and it was there before the run."""
    if folder.exists():
        _not_removed.add(folder.resolve())


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a job that was refused before it held it, and those above that were made for it."""
    with suppress(OSError):  # not empty
        if folder.resolve() not in _not_removed:
            folder.rmdir()
        for parent in folder.parents:
            if parent in _made:
                parent.rmdir()


@contextmanager
def locked(folder: RunFolder, loggers: Collection[str] = ()) -> Iterator[None]:
    """Lock a folder for the training of this process; it is made if it is not there.

    If the run is refused or stopped before it has trained, the files that this process wrote are removed.

    Args:
        folder: The run's folder.
        loggers: Names of the folders in it into which loggers write.

    Raises:
        ConfigurationError: Another process trains in it, it cannot be written, or other things have its files' names.
    """
    folder.refuse_misplaced()
    lock = _lock(folder)
    before = {path.name for path in folder.path.iterdir()} - {RunFolder.lock}
    try:
        yield
    except (DPBenchError, KeyboardInterrupt):
        _take_back(folder, before, _OURS.union(loggers))
        raise
    finally:
        lock.close()


def _lock(folder: RunFolder) -> Any:
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # somebody whose run was refused took the folder away at this moment
            return open_locked(folder.lock)
        folder.path.mkdir(parents=True, exist_ok=True)
        return open_locked(folder.lock)
    except BlockingIOError:
        raise ConfigurationError(
            f"another process trains in {folder}: wait until it ends, or choose another folder."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"the run folder {folder} cannot be written: {error.strerror}.") from None


def _take_back(folder: RunFolder, before: set[str], ours: set[str]) -> None:
    if folder.trained:
        return
    path = folder.path
    names = {entry.name for entry in path.iterdir()}
    if not before and names <= ours and path.resolve() not in _not_removed | {Path.cwd()}:
        hidden = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(OSError):
            _not_removed.add(path.resolve())
            path.rename(hidden)  # at once: whoever wants the folder now makes a new one
            shutil.rmtree(hidden)
        return
    for name in (names & ours) - before:
        entry = path / name
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def full_disk_explained(folder: RunFolder) -> Iterator[None]:
    """Within, explain the consequences of a full disk, whichever file did not fit.

    Raises:
        DiskFull: A file did not fit; raised in place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if not is_full_disk(error) and "temporary directory" not in str(error):
            raise
        name = str(error.filename2 or error.filename or "")  # a copy names its source first
        place = name if os.sep in name else f"{folder}, or of the system's temporary files ($TMPDIR)"
        state = "ledger and last checkpoint are kept" if folder.checkpoint.exists() else "there is no checkpoint yet"
        raise DiskFull(
            f"no space left on the disk of {place}: the last file was not written, {state}. Free some "
            f"space, and continue with: {folder.command('resume')}"
        ) from error
