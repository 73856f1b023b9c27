"""Ledgers of runs: finding them, reading them, and comparing them with the run's result or checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.files import from_here
from dpbench.harness.runs.folder import RunFolder, natural_order, places_of
from dpbench.privacy.accounting.ledger import Ledger, check_one_population, check_own_randomness, read_ledger
from dpbench.privacy.accounting.seal import STATE_KEY, Seal, difference
from dpbench.privacy.accounting.tails import end_of, uncovered_delta
from dpbench.privacy.events import record_changes

_HEADER = b'{"record":"header"'
_MOST_NEIGHBORS = 500  # ledgers beside a run whose headers are read
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
    ledgers: dict[str, Path] = {}
    files: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise ConfigurationError(
                f"{path}: No such file or directory; name the folder of a run or of a sweep, or a ledger."
            )
        for run in without_ledger([path]):
            if (lost := lost_ledger(run)) is not None:
                raise LedgerError(f"{run}: {lost}. Restore it: epsilon cannot be computed without it.")
        below = _ledgers_below(path) if path.is_dir() else [path]
        if not below and runs_without_privacy([path]):
            raise ConfigurationError(f"{path} trained without privacy: it has no ledger, epsilon is infinite.")
        if not below:
            raise ConfigurationError(f"there is no {RunFolder.ledger} in or below the folder {path}.")
        for ledger in below:
            if ledger.resolve() in files:
                raise ConfigurationError(f"{ledger} is given twice, and each run counts once: name it once.")
            files.add(ledger.resolve())
            ledgers[str(ledger.parent if ledger.name == RunFolder.ledger else ledger)] = ledger
    return ledgers


def _ledgers_below(folder: Path) -> list[Path]:
    """All ledgers in and below a folder; where a run has one, copies of it (such as an exported model's) only once."""
    ledgers = [RunFolder(place).ledger for place in places_of(RunFolder.ledger, folder)]
    first = RunFolder(folder).ledger
    if first not in ledgers:
        return ledgers
    content = first.read_bytes()
    return [first, *(path for path in ledgers if path != first and path.read_bytes() != content)]


def runs_without_privacy(paths: Sequence[Path]) -> list[str]:
    """Runs below some folders that trained and have no ledger, because their strategy is not private."""
    return [str(folder) for folder in without_ledger(paths) if lost_ledger(folder) is None]


def without_ledger(paths: Sequence[Path]) -> list[RunFolder]:
    """Runs below some folders that trained and have no ledger, for any reason."""
    traces = (RunFolder.result, RunFolder.partial_result, RunFolder.checkpoint)
    places: set[Path] = set()
    for path in paths:
        for name in traces:
            places.update(places_of(name, path))
    runs = map(RunFolder, sorted(places, key=natural_order))
    return [run for run in runs if not run.ledger.exists()]


def read_run_ledger(path: Path) -> Ledger:
    """Read a ledger, with `doubt` if it is not the one that its run left.

    Args:
        path: Path of the ledger; if it lies in a run's folder, it is compared with the run's files.

    Raises:
        LedgerError: It is no ledger.
    """
    ledger = read_ledger(path)
    if path.name == RunFolder.ledger:
        ledger.doubt = doubt_about(RunFolder(path.parent), len(ledger.releases))
    return ledger


def complete_ledger(path: Path, checkpoint: dict[str, Any]) -> Ledger | None:
    """Ledger of a checkpoint; None if it was trained without privacy, even if a ledger lies in the same folder.

    Raises:
        ConfigurationError: It tells of fewer releases than the checkpoint, or is not the ledger that the checkpoint or
            the result knows: ε would be wrong.
    """
    strategy = checkpoint.get("callbacks", {}).get(STATE_KEY, {"private": False})
    if not strategy["private"]:
        return None
    ledger = read_run_ledger(path) if path.exists() else None
    if ledger is None or ledger.damage or len(ledger.releases) < strategy["releases"]:
        raise ConfigurationError(
            f"{path} is missing, damaged or cut: the checkpoint made {strategy['releases']} releases. Without all of "
            "them no epsilon can be stated; restore the ledger."
        )
    seal = Seal.read(strategy.get("ledger"))
    reason = ledger.doubt
    if not reason and seal is not None:
        reason = difference(path, seal, "the checkpoint")
    if reason is not None:
        raise ConfigurationError(f"{path}: {reason}. No epsilon can be stated; restore the ledger of this run.")
    return ledger


def read_one_ledger(path: Path) -> Ledger:
    """The intact ledger of one run.

    Raises:
        LedgerError: It is damaged, empty, or there are several.
    """
    places = list(find_ledgers([path]).values())
    if len(places) != 1:
        raise LedgerError(f"{path} holds {len(places)} ledgers: name one run.")
    ledger = read_run_ledger(places[0])
    check_one_population({str(path): ledger})
    if ledger.damage is not None:
        raise LedgerError(f"{path}: {ledger.damage}; only a lower bound of its cost is known.")
    if ledger.doubt is not None:
        raise LedgerError(f"{path}: {ledger.doubt}; its cost is unknown. Restore the ledger.")
    if not ledger.releases:
        raise LedgerError(f"{path}: no release is recorded.")
    return ledger


def noise_of(ledger: Ledger) -> dict[str, Any]:
    """Noise and batch sizes of releases.

    Args:
        ledger: A ledger with releases.

    Returns:
        Figures by name; each is [least, most] where releases differ.

        - `noise_multiplier`: noise over sensitivity of a whole release, statistics included, as accountants take it.
        - `noise_std_over_max_grad_norm`: the figure of `strategy.noise_multiplier`, where it differs.
        - `sample_rate`, `expected_batch_size`: sampling rate and expected number of records in a batch.
        - `noise_bands`: number of steps over which noise is correlated, where it is.
        - `uncovered_delta`: additional δ due to the bounded support of the noise, if above a tenth of delta.
        - `noise_end`: end of the noise, given with it, in standard deviations; None for an older version's.
    """
    multipliers = []
    over_bounds = []
    rates = []
    sizes = []
    events = [event for one in ledger.events for event in list(chain(*one.sampling.trials)) or [one]]
    for sampling, queries in events:
        z = queries[0].noise_std  # one query that costs as much as all of them
        multipliers.append(z)
        over_bounds.append(z * record_changes(sampling, ledger.header.microbatch_size))
        rates.append(sampling.expected_batch_size / sampling.population)
        sizes.append(sampling.expected_batch_size)
    facts: dict[str, Any] = {"noise_multiplier": _range(multipliers)}
    over_bound = _range(over_bounds)
    if over_bound != facts["noise_multiplier"]:
        facts["noise_std_over_max_grad_norm"] = over_bound
    facts["sample_rate"] = _range(rates)
    facts["expected_batch_size"] = _range(sizes)
    bands = [header.plan.noise.bands for header in ledger.headers if header.plan is not None]
    if max(bands, default=1) > 1:
        facts["noise_bands"] = _range(bands)
    beyond = uncovered_delta(ledger)
    if beyond > ledger.header.delta / 10:
        ends = [end_of(header) for header in ledger.headers]
        facts["uncovered_delta"] = beyond
        facts["noise_end"] = None if None in ends else min(end for end in ends if end is not None)
    return facts


def _range(values: Sequence[float]) -> float | list[float]:
    least = min(values)
    most = max(values)
    return least if most <= least * (1 + 1e-8) else [least, most]  # bounds that adapt round differently


def doubt_about(run: RunFolder, releases: int | None = None) -> str | None:
    """Say how a run's ledger differs from the one that its result or, before there is one, its checkpoint sealed.

    Args:
        run: Folder, with a ledger.
        releases: Number of releases in the ledger, for results that are older than the running hash.

    Returns:
        A piece of a sentence; None without a difference, or without a seal.
    """
    for witness, statement, ended in _witnesses(run):
        if _UNREADABLE in statement:
            return f"{run.ledger.name} cannot be compared with {run.checkpoint}, which cannot be read"
        seal = Seal.read(statement.get("ledger"))
        counted = statement.get("releases")
        wrong = None
        if seal is not None:
            wrong = difference(run.ledger, seal, witness, ended)
        elif isinstance(counted, int) and releases is not None:
            # A ledger may be ahead of a checkpoint, which is written later, and never of a result.
            differs = releases != counted if ended else releases < counted
            if differs:
                wrong = f"{releases} releases, and {witness} counts {counted}: it was cut, or is of another run"
        if wrong is not None:
            return f"{run.ledger.name} has {wrong}"
    return None


def lost_ledger(run: RunFolder) -> str | None:
    """Name the file that proves that a run had a ledger which is now missing.

    Returns:
        A piece of a sentence; None if the ledger is there, or if no file tells of one: the run had no privacy.
    """
    if run.ledger.exists():
        return None
    for witness, statement, _ in _witnesses(run):
        if Seal.read(statement.get("ledger")) is not None or statement.get("releases"):
            return f"{run.ledger.name} is missing, although {witness} refers to it"
    return None


def _witnesses(run: RunFolder) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield each file that states facts of a ledger, with the facts, and whether the ledger was complete."""
    for record in (run.result, run.partial_result):
        with suppress(OSError, KeyError, RecursionError, *_OTHER_SHAPES):
            privacy = json.loads(record.read_text(encoding="utf-8"))["privacy"]
            yield record.name, dict(privacy), record == run.result
            if record == run.result:
                return  # written last, with what the checkpoint knows
    if run.checkpoint.is_file():
        from dpbench.harness.runs.readers import read_checkpoint  # brings pandas

        statement: dict[str, Any] = {_UNREADABLE: True}
        with suppress(ConfigurationError, KeyError, TypeError, ValueError):
            statement = dict(read_checkpoint(run.checkpoint)["callbacks"][STATE_KEY])
        yield "the checkpoint", statement, False


# Runs that drew their noise or lots from one key for different releases: no epsilon covers them together


def shared_noise(runs: Iterable[RunFolder]) -> list[str]:
    """One line for each two runs that share noise or batches for different releases."""
    drawn: dict[tuple[str, int, str], list[Path]] = {}
    for run in runs:
        for source in _sources(run.ledger):
            drawn.setdefault(source, []).append(run.ledger)
    pairs: set[tuple[Path, Path]] = set()
    for ledgers in drawn.values():
        pairs.update(combinations(ledgers, 2))
    lines = []
    for first, second in sorted(pairs):
        lines += _complaint(first, second)
    return lines


def shared_with_neighbors(run: RunFolder) -> list[str]:
    """One line for each run in the same folder, or in a sibling of it, that shares noise or batches with a run."""
    if not run.ledger.is_file():
        return []
    sources = _sources(run.ledger)
    lines = []
    for ledger in islice(_neighbors(run), _MOST_NEIGHBORS):
        if sources & _sources(ledger):
            lines += _complaint(run.ledger, ledger)
    return lines


def _neighbors(run: RunFolder) -> Iterator[Path]:
    around = run.path.resolve().parent
    for pattern, folder in (("*", around), ("*/*", around.parent)):
        for ledger in folder.glob(f"{pattern}/{RunFolder.ledger}"):
            other = ledger.parent
            if other != run.path.resolve() and (pattern == "*" or other.parent != around):
                yield ledger


def _sources(ledger: Path) -> set[tuple[str, int, str]]:
    """Sources of randomness of a ledger's phases, from their headers."""
    sources = set()
    try:
        with ledger.open("rb") as file:
            headers = [json.loads(line) for line in file if line.startswith(_HEADER)]
        for header in headers:
            for name in ("noise_source", "lot_source"):
                if header.get(name) is not None:
                    sources.add((name, header["phase"], header[name]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: other readers say so
        return set()
    return sources


def _complaint(one: Path, other: Path) -> list[str]:
    try:
        check_own_randomness({from_here(path.parent): read_ledger(path) for path in (one, other)})
    except LedgerError as error:
        return [str(error)]
    return []
