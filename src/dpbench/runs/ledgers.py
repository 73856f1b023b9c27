"""Ledgers of runs: found, read, and compared with what the run's result or checkpoint knows of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.ledger import Ledger, read_ledger
from dpbench.privacy.accounting.seal import Seal, difference
from dpbench.privacy.accounting.tails import uncovered_delta
from dpbench.privacy.events import record_changes
from dpbench.runs.folder import RunFolder, places_of

_STRATEGY = "dpbench.PrivateStrategy"
_UNREADABLE = "unreadable"
_OTHER_SHAPES = (ValueError, TypeError, AttributeError)


def find_ledgers(paths: Sequence[Path]) -> dict[str, Path]:
    """Ledgers of runs, and of all runs below folders of sweeps.

    Args:
        paths: Ledgers, folders of runs, folders of sweeps.

    Raises:
        ConfigurationError: A folder holds none, cannot be looked into, or a ledger is named twice.
        LedgerError: The ledger of a private run is gone.
    """
    found: list[Path] = []
    for path in paths:
        below = _ledgers_below(path) if path.is_dir() else [path]
        if not path.exists():
            raise ConfigurationError(
                f"{path}: No such file or directory; name the folder of a run or of a sweep, or a ledger."
            )
        for folder in without_ledger([path]):
            if (lost := lost_ledger(folder)) is not None:
                raise LedgerError(f"{folder}: {lost}. Without it no epsilon can be told: restore it.")
        if not below and runs_without_privacy([path]):
            raise ConfigurationError(f"{path} trained without privacy: it has no ledger, epsilon is infinite.")
        if not below:
            raise ConfigurationError(f"there is no {RunFolder.ledger} in or below {path}.")
        found += below
    if len({path.resolve() for path in found}) < len(found):
        raise ConfigurationError("a ledger is named twice: each run counts once.")
    return {str(path.parent if path.name == RunFolder.ledger else path): path for path in found}


def _ledgers_below(folder: Path) -> list[Path]:
    """All ledgers in and below a folder; where a run has one, copies of it (such as an exported model's) only once."""
    found = [RunFolder(place).ledger for place in places_of(RunFolder.ledger, folder)]
    own = RunFolder(folder).ledger
    if own not in found:
        return found
    return [own, *(path for path in found if path != own and path.read_bytes() != own.read_bytes())]


def runs_without_privacy(paths: Sequence[Path]) -> list[str]:
    """Runs below some folders that trained and have no ledger, because their strategy is not private."""
    return sorted(str(folder) for folder in without_ledger(paths) if lost_ledger(folder) is None)


def without_ledger(paths: Sequence[Path]) -> list[RunFolder]:
    """Runs below some folders that trained and have no ledger, for whatever reason."""
    traces = (RunFolder.result, RunFolder.partial_result, RunFolder.checkpoint)
    found = {place for path in paths for name in traces for place in places_of(name, path)}
    return [run for run in map(RunFolder, sorted(found)) if not run.ledger.exists()]


def read_run_ledger(path: Path) -> Ledger:
    """A ledger, with `doubt` where it is not what its run left.

    Args:
        path: Of the ledger; its run's folder is looked at if it lies in one.

    Raises:
        LedgerError: It is no ledger.
    """
    ledger = read_ledger(path)
    if path.name == RunFolder.ledger:
        ledger.doubt = doubt_about(RunFolder(path.parent), len(ledger.releases))
    return ledger


def noise_of(ledger: Ledger) -> dict[str, Any]:
    """Noise and lots with which releases were made.

    Args:
        ledger: With releases.

    Returns:
        Figures by name; each is [least, most] where releases differ.

        - `noise_multiplier`: noise over sensitivity of a whole release, statistics included, as accountants take it.
        - `noise_std_over_max_grad_norm`: what `strategy.noise_multiplier` means, where that is another figure.
        - `sample_rate`, `expected_batch_size`: of the lots.
        - `uncovered_delta`: what no epsilon covers because noise ends somewhere, where that is above a tenth of delta.
        - `noise_end`: beside it, in standard deviations; None for an older version's.
    """
    size = ledger.header.microbatch_size
    made = [(queries[0].noise_std, sampling) for sampling, queries in ledger.events]  # one query that costs as much
    rates = [sampling.expected_batch_size / sampling.population for _, sampling in made]
    facts: dict[str, Any] = {"noise_multiplier": _range([z for z, _ in made])}
    over_bound = _range([z * record_changes(sampling, size) for z, sampling in made])
    facts |= {} if over_bound == facts["noise_multiplier"] else {"noise_std_over_max_grad_norm": over_bound}
    sizes = _range([sampling.expected_batch_size for _, sampling in made])
    facts |= {"sample_rate": _range(rates), "expected_batch_size": sizes}
    beyond = uncovered_delta(ledger)
    if beyond > ledger.header.delta / 10:
        known = [header.noise_end for header in ledger.headers if header.noise_end is not None]
        least = min(known) if len(known) == len(ledger.headers) else None
        facts |= {"uncovered_delta": beyond, "noise_end": least}
    return facts


def _range(values: Sequence[float]) -> float | list[float]:
    least, most = min(values), max(values)
    return least if most <= least * (1 + 1e-8) else [least, most]  # bounds that adapt round differently


def doubt_about(run: RunFolder, releases: int | None = None) -> str | None:
    """Say how a run's ledger differs from what its result or, before there is one, its checkpoint knows of it.

    Args:
        run: Folder, with a ledger.
        releases: In the ledger; compared with results that are older than the running hash.

    Returns:
        None, also where nobody knows anything of it, or a piece of a sentence.
    """
    for witness, told, ended in _witnesses(run):
        if _UNREADABLE in told:
            return f"{run.ledger.name} cannot be compared with {run.checkpoint}, which cannot be read"
        seal = Seal.read(told.get("ledger"))
        if seal is not None:
            wrong = difference(run.ledger, seal, witness, ended)
        else:
            before, now = told.get("releases"), releases
            fewer = isinstance(before, int) and now is not None and (now < before or (ended and now > before))
            wrong = f"{now} releases of {before} that {witness} counts: it was cut, or is of another run"
            wrong = wrong if fewer else None
        if wrong is not None:
            return f"{run.ledger.name} has {wrong}"
    return None


def lost_ledger(run: RunFolder) -> str | None:
    """Say who tells of a run's ledger that is not there.

    Returns:
        None where it is there, or where nobody tells of one: the run had no privacy. Otherwise a piece of a sentence.
    """
    for witness, told, _ in _witnesses(run) if not run.ledger.exists() else ():
        if Seal.read(told.get("ledger")) is not None or told.get("releases"):
            return f"{run.ledger.name} is missing, of which {witness} tells"
    return None


def _witnesses(run: RunFolder) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Who tells what of a ledger, and whether it was complete then."""
    for record in (run.result, run.partial_result):
        with suppress(OSError, KeyError, RecursionError, *_OTHER_SHAPES):
            privacy = json.loads(record.read_text(encoding="utf-8"))["privacy"]
            yield record.name, dict(privacy), record == run.result
            if record == run.result:
                return  # written last, with what the checkpoint knows
    if run.checkpoint.is_file():
        import torch

        told: dict[str, Any] = {_UNREADABLE: True}
        with suppress(
            OSError, RuntimeError, EOFError, UnpicklingError, LookupError, ValueError, TypeError, AttributeError
        ):
            state = torch.load(run.checkpoint, map_location="cpu", weights_only=True, mmap=True)
            told = dict(state["callbacks"][_STRATEGY])
        yield "the checkpoint", told, False
