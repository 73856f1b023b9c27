"""Ledgers of runs: found, read, and compared with what the run's result or checkpoint knows of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.privacy.ledger import Ledger, read_ledger
from dpbench.privacy.seal import Seal, difference

LEDGER, CHECKPOINT = "ledger.jsonl", Path("checkpoints") / "last.ckpt"
RESULT, PARTIAL = "result.json", "partial_result.json"
_STRATEGY = "dpbench.PrivateStrategy"
_OTHER_SHAPES = (ValueError, TypeError, AttributeError)


def find_ledgers(paths: Sequence[Path]) -> dict[str, Path]:
    """Ledgers of runs, and of all runs below folders of sweeps.

    Args:
        paths: Ledgers, folders of runs, folders of sweeps.

    Raises:
        ConfigurationError: A folder holds none, or a ledger is named twice.
    """
    found: list[Path] = []
    for path in paths:
        below = [path / LEDGER] if (path / LEDGER).exists() else sorted(path.rglob(LEDGER)) if path.is_dir() else [path]
        if not path.exists():
            raise ConfigurationError(
                f"{path}: No such file or directory; name the folder of a run or of a sweep, or a ledger."
            )
        if not below and runs_without_privacy([path]):
            raise ConfigurationError(f"{path} trained without privacy: it has no ledger, epsilon is infinite.")
        if not below:
            raise ConfigurationError(f"there is no {LEDGER} in or below {path}.")
        found += below
    if len({path.resolve() for path in found}) < len(found):
        raise ConfigurationError("a ledger is named twice: each run counts once.")
    return {str(path.parent if path.name == LEDGER else path): path for path in found}


def runs_without_privacy(paths: Sequence[Path]) -> list[str]:
    """Runs below some folders that trained and have no ledger, because their strategy is not private."""
    traces = (RESULT, PARTIAL, "checkpoints")
    found = {trace.parent for path in paths if path.is_dir() for name in traces for trace in path.rglob(name)}
    return sorted(str(folder) for folder in found if not (folder / LEDGER).exists())


def read_run_ledger(path: Path) -> Ledger:
    """A ledger, with `doubt` where it is not what its run left.

    Args:
        path: Of the ledger; its run's folder is looked at if it lies in one.

    Raises:
        LedgerError: It is no ledger.
    """
    ledger = read_ledger(path)
    if path.name == LEDGER:
        ledger.doubt = doubt_about(path.parent, len(ledger.releases))
    return ledger


def doubt_about(run: Path, releases: int | None = None) -> str | None:
    """What is wrong with a run's ledger in the eyes of its result or, before there is one, of its checkpoint.

    Args:
        run: Folder, with a ledger.
        releases: In the ledger; compared with results that are older than the running hash.

    Returns:
        None, also where nobody knows anything of it, or a piece of a sentence.
    """
    for witness, told, ended in _witnesses(run):
        seal = Seal.read(told.get("ledger"))
        if seal is not None:
            wrong = difference(run / LEDGER, seal, witness, ended)
        else:
            before, now = told.get("releases"), releases
            fewer = isinstance(before, int) and now is not None and (now < before or (ended and now > before))
            wrong = f"{now} releases of {before} that {witness} counts: it was cut, or is of another run"
            wrong = wrong if fewer else None
        if wrong is not None:
            return f"{LEDGER} has {wrong}"
    return None


def _witnesses(run: Path) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Who tells what of a ledger, and whether it was complete then."""
    for name in (RESULT, PARTIAL):
        with suppress(OSError, KeyError, RecursionError, *_OTHER_SHAPES):
            privacy = json.loads((run / name).read_text(encoding="utf-8"))["privacy"]
            yield name, dict(privacy), name == RESULT
            if name == RESULT:
                return  # written last, with what the checkpoint knows
    if (run / CHECKPOINT).is_file():
        import torch

        with suppress(
            OSError, RuntimeError, EOFError, UnpicklingError, LookupError, ValueError, TypeError, AttributeError
        ):
            state = torch.load(run / CHECKPOINT, map_location="cpu", weights_only=True, mmap=True)
            yield "the checkpoint", dict(state["callbacks"][_STRATEGY]), False
